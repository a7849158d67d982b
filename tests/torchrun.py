"""torchrun as it is, but for the port at which ranks meet: nobody else is given that one (see `ports`)."""

from torch.distributed import run
from torch.distributed.elastic.rendezvous import api

from ports import free_port

if __name__ == "__main__":
    api.get_free_port = free_port
    run.main()

"""Weights out, and DCP in: Hugging Face export beside `safetensors`, DCP read beside torch's own.

The state is GPT-2 small with AdamW's moments as `dcp.save` has written it, 1.5 GB, in the page cache; whole
processes.  *export*: its weights as safetensors; the peer loads them by `dcp.load` into tensors and calls
`safetensors.torch.save_file`.  *all*: everything as one checkpoint; the peer is `dcp_to_torch_save`.
*read*: everything into a live model and optimizer, by `holdfast.load`, or by `dcp.load` into what
`get_state_dict` gives and `set_state_dict`; the load alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import measuring, ratio, report, row, scratch, seconds, take_turns
from bench.lib.files import files_below, warm
from bench.lib.watching import watch

CLAIMS = (
    Claim(
        "An export, a conversion and a load of a DCP directory take half the time that they take by DCP.",
        r"^(weights to Hugging Face|DCP to one .*checkpoint|load of a DCP directory, 1 rank) \|",
        at_least=2,
    ),
)

CLI = "from holdfast.cli.main import main; main()"
EXPORT = """
import sys, torch, torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
meta = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
meta = {n: m for n, m in meta.items() if n.startswith("model.")}
state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in meta.items()}
dcp.load(state, checkpoint_id=sys.argv[1])
save_file({n.removeprefix("model."): t for n, t in state.items()}, sys.argv[2])
"""
SAVE = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""
READ = """
import sys, time
import holdfast, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from bench.lib.state import State
state = State(1, small=sys.argv[3] == "1", seed=1)
began = time.perf_counter()
if sys.argv[2] == "holdfast":
    holdfast.load(sys.argv[1], state.for_holdfast())
else:
    model, optim = get_state_dict(state.model, state.optim)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=sys.argv[1])
    set_state_dict(state.model, state.optim, model_state_dict=model, optim_state_dict=optim)
print(time.perf_counter() - began)
"""
MAKE = """
import sys
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from bench.lib.state import State
state = State(1, small=sys.argv[2] == "1")
model, optim = get_state_dict(state.model, state.optim)
dcp.save({"model": model, "optim": optim}, checkpoint_id=sys.argv[1])
"""


class Contest:
    def __init__(self, root: Path, small: bool) -> None:
        self.root, self.small = root, str(int(small))
        self.source = root / "dcp"
        self.python(MAKE, self.source, self.small)
        warm(files_below(self.source))

    def python(self, text: str, *args: object) -> Any:
        env = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "2"}
        return watch([sys.executable, "-c", text, *map(str, args)], env=env)

    def timed(self, text: str, *args: object) -> float:
        out = self.root / "out"
        taken = self.python(text, *args).seconds
        shutil.rmtree(out) if out.is_dir() else out.unlink()
        os.sync()
        return taken

    def contestants(self) -> dict[str, Any]:
        out = self.root / "out"
        convert = (CLI, "convert", self.source, out, "--to")
        read = (READ, self.source)
        return {
            "export holdfast": lambda _: self.timed(*convert, "huggingface"),
            "export peer": lambda _: self.timed(EXPORT, self.source, out),
            "all holdfast": lambda _: self.timed(*convert, "universal"),
            "all peer": lambda _: self.timed(SAVE, self.source, out),
            "read holdfast": lambda _: float(self.python(*read, "holdfast", self.small).output),
            "read peer": lambda _: float(self.python(*read, "dcp", self.small).output),
        }


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    s, size = found["seconds"], found["bytes"]
    told = (
        ("export", "weights to Hugging Face", "dcp.load + safetensors save_file", size // 3),
        ("all", "DCP to one consolidated checkpoint", "dcp_to_torch_save", size),
        ("read", "load of a DCP directory, 1 rank", "dcp.load", size),
    )
    return [
        row(what, seconds(s, f"{key} holdfast", n), f"{peer} {seconds(s, f'{key} peer', n)}",
            ratio(s, f"{key} peer", f"{key} holdfast"))
        for key, what, peer, n in told
    ]  # fmt: skip


def main() -> None:
    args = measuring(__doc__, rounds=6).parse_args()
    began = time.time()
    with scratch(args) as root:
        contest = Contest(root, args.small)
        turns = take_turns(contest.contestants(), args.rounds)
        size = sum(f.stat().st_size for f in files_below(contest.source))
    found = {"seconds": turns, "bytes": size}
    report(CLAIMS, __doc__, args, found, rows(found), began)


if __name__ == "__main__":
    main()

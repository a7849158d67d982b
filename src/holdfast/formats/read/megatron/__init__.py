"""Checkpoints of Megatron-Core (`torch_dist`), read in place.

iter_0001000/.metadata, __0_0.distcp, ...   DCP: tensors of global shape, and archives of values
iter_0001000/common.pt                      a torch.save file: what all ranks share
iter_0001000/metadata.json                  which kind of checkpoint it is
latest_checkpointed_iteration.txt           1000
"""

"""Prove a resume: run a training whole, killed and resumed, and name the first thing that differs.

`inside` runs in the processes of the training, and observes; the modules beside it run it and compare.
"""

from holdfast.prove.proving import Proof, prove

__all__ = ["Proof", "prove"]

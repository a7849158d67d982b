"""Prove a resume: run a training whole, killed and resumed, and name the first thing that differs.

`inside` runs in the processes of the training, and observes; the modules beside it run them and compare.
"""

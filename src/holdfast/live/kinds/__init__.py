"""The kinds of values that a state may have: what a save collects of each, and how a restore puts it back.

A value is asked once what it is (`choosing`).  From then on its kind answers for it:

    collect    named, placed tensors, and extras                    a save, and what a record has of a step
    place      where its saved tensors go; changes nothing          a restore, before anything is read
    compare    what else was saved and does not fit
    put        what is no tensor of its own, once all is read

    module     modules of torch or a framework, and lists of stages     engine    optimizers of frameworks
    optimizer  optimizers of torch, one or several together             object    state_dict() of its own
    tensor     a tensor that the script handed over                     values    lists, dicts, numbers
"""

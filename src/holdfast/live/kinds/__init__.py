"""The kinds of values that a state may have.  Each kind collects its values for a save and puts them back.

`choosing` asks a value once what it is.  From then on its kind answers for it:

    collect    name and place tensors, encode extras                a save; `collect_step`: a record
    place      find places for saved tensors; change nothing        a restore, before anything is read
    compare    find saved extras that do not fit
    put        put extras back, once all tensors are read

    module     modules of torch or a framework, and lists of stages     engine    optimizers of frameworks
    optimizer  optimizers of torch, one or several together             object    state_dict() of its own
    tensor     a tensor that the script handed over                     values    lists, dicts, numbers
"""

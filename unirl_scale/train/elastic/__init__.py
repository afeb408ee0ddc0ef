"""Going on when ranks are lost, hang or come back.

    view         who is in the job, as all ranks agree on it
    messages     what the control threads say to each other
    hub          decides the next view; a state machine without sockets or clocks
    directory    where a newcomer finds the job, and the numbering that fences off stale parts of it
    seen         what a process knows of the job, and how its control thread works
    search       asking other processes for the hub
    control      the control thread of a rank: its links, its hub or its successor, the rank that it watches
    membership   what the training thread talks to
    session      training on one view after another
    faults       failures on purpose, for tests

The control plane is apart from the data plane: it talks over sockets of its own, so it works while
collectives hang, and it lives in the ranks, so it needs no service that could be lost. Any rank can be the
hub; when the hub is lost the next rank takes over.
"""

"""Random trainings with random faults, each step compared with one process on the whole batch.

    python tools/soak                           two minutes, another seed each time
    python tools/soak --minutes 60 --seed 7     an hour, the same one again

`plan.py` draws an episode from its seed; `model.py` is what trains, and on what data; `reference.py` computes
what must come out; `trainee.py` is one rank; `crew.py` are the processes; `driver.py` gives orders, kills and
judges.
"""

"""One command for the day there is a GPU: what no machine without one can show, in under four minutes.

    python tools/gpu_check                      everything, on device 0
    python tools/gpu_check --only kernels       one section; --help has the rest

docs/gpu/README.md says what each line of its report means. `runner.py` runs the sections, each step of them
in a process that may crash or hang; `steps.py` is what a step is given; the other files are a section each.
"""

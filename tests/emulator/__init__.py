"""An emulated libcuda.so.1 and libnccl.so.2 that run on the CPU; see README.md."""

// The few types that nccl.h takes from the CUDA runtime: the emulated libnccl needs no runtime.
#pragma once
#include <cstddef>
#include <cstdint>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

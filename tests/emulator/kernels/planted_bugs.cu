// Kernels with one bug each: the emulator's tests demand that every one is found.

extern "C" __global__ void missing_barrier(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[63 - threadIdx.x];
}

extern "C" __global__ void missing_barrier_in_loop(float* x) {
    extern __shared__ float part[];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int o = blockDim.x / 2; o; o >>= 1)
        if (threadIdx.x < o) part[threadIdx.x] += part[threadIdx.x + o];
    if (threadIdx.x == 0) x[0] = part[0];
}

extern "C" __global__ void missing_warp_barrier(int* out) {
    __shared__ int values[32];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[31 - threadIdx.x];
}

extern "C" __global__ void divergent_barrier(int* out) {
    if (threadIdx.x < 40) __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void two_barriers(int* out) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void divergent_shuffle(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x & 1)
        v = __shfl_xor_sync(0xffffffffu, v, 1);
    else
        v = __shfl_xor_sync(0xffffffffu, v, 2);
    out[threadIdx.x] = v;
}

extern "C" __global__ void caller_not_in_mask(int* out) {
    out[threadIdx.x] = __shfl_sync(0x0000ffffu, (int)threadIdx.x, 0);
}

extern "C" __global__ void source_not_in_mask(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, (int)threadIdx.x, 20);
}

extern "C" __global__ void blocks_write_one_cell(int* out) { out[0] = blockIdx.x; }

extern "C" __global__ void block_reads_neighbour(int* out) {
    out[1 + blockIdx.x] = 1;
    if (blockIdx.x) out[100 + blockIdx.x] = out[blockIdx.x];
}

extern "C" __global__ void plain_beside_atomic(int* out) {
    if (blockIdx.x)
        atomicAdd(out, 1);
    else
        out[0] = 5;
}

extern "C" __global__ void misaligned_vector(int* out) {
    *(uint4*)(out + 1) = make_uint4(1, 2, 3, 4);
}

extern "C" __global__ void misaligned_load(const int* x, int* out) {
    uint4 v = *(const uint4*)(x + 1);
    out[0] = v.x + v.y + v.z + v.w;
}

extern "C" __global__ void beyond_allocation(int* out, int n) { out[n] = 1; }

extern "C" __global__ void beyond_shared(int* out) {
    extern __shared__ int slots[];
    slots[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = slots[threadIdx.x];
}

extern "C" __global__ void reads_fresh_shared(float* out) {
    __shared__ float never_written[32];
    out[threadIdx.x] = never_written[threadIdx.x];
}

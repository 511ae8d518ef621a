// Kernels of the emulator's own tests: correct ones, written as the product's kernels are.
typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

extern "C" __global__ void empty(float* x, int n) {}

extern "C" __global__ void add_scalar(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += a;
}

// Per-chunk min/max uint8 quantiser: one block for a chunk, by warp shuffles and shared memory.
extern "C" __global__ void quantize_u8(const float* __restrict__ x, u8* __restrict__ q,
                                       float* __restrict__ low_out, float* __restrict__ scale_out,
                                       i64 n, int chunk, int* largest) {
    __shared__ float low_of_warp[32], high_of_warp[32];
    i64 base = (i64)blockIdx.x * chunk;
    int m = n - base < chunk ? (int)(n - base) : chunk;
    float low = __int_as_float(0x7f800000), high = -low;
    for (int i = threadIdx.x; i < m; i += blockDim.x) {
        low = fminf(low, x[base + i]);
        high = fmaxf(high, x[base + i]);
    }
    for (int o = 16; o; o >>= 1) {
        low = fminf(low, __shfl_xor_sync(0xffffffffu, low, o));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, o));
    }
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    if (lane == 0) {
        low_of_warp[warp] = low;
        high_of_warp[warp] = high;
    }
    __syncthreads();
    low = low_of_warp[0];
    high = high_of_warp[0];
    for (int w = 1; w < warps; w++) {
        low = fminf(low, low_of_warp[w]);
        high = fmaxf(high, high_of_warp[w]);
    }
    float scale = __fdiv_rn(__fsub_rn(high, low), 255.0f);
    float inverse = scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
    for (int i = threadIdx.x; i < m; i += blockDim.x)
        q[base + i] = (u8)__float2uint_rn(__fmul_rn(__fsub_rn(x[base + i], low), inverse));
    if (threadIdx.x == 0) {
        low_out[blockIdx.x] = low;
        scale_out[blockIdx.x] = scale;
        atomicMax(largest, __float_as_int(high - low));
    }
}

// bfloat16 rows, eight elements a thread by 16-byte loads, summed in dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) row_sums_bf16(const uint4* x, float* out,
                                                                int vectors) {
    extern __shared__ float part[];
    const uint4* row = x + (i64)blockIdx.x * vectors;
    float sum = 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        uint4 v = __ldg(row + i);
        unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum += __uint_as_float(words[j] << 16) + __uint_as_float(words[j] & 0xffff0000u);
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int o = blockDim.x / 2; o; o >>= 1) {
        if (threadIdx.x < o) part[threadIdx.x] += part[threadIdx.x + o];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

// The last block to finish adds up what the others published.
extern "C" __global__ void sum_by_last_block(const float* x, float* partial, float* out,
                                             unsigned* done, int n) {
    __shared__ float part[256];
    __shared__ bool last;
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        sum += x[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < blockDim.x; i++) sum += part[i];
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float total = 0;
        for (int i = 0; i < gridDim.x; i++) total += partial[i];
        *out = total;
    }
}

#define SCALE_KERNEL(name, type)                                         \
    extern "C" __global__ void name(type* x, type a, i64 n) {            \
        i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;              \
        if (i < n) x[i] *= a;                                            \
    }
SCALE_KERNEL(scale_f32, float)
SCALE_KERNEL(scale_f64, double)

// Reductions, in rank order, rounded in the type after every step. (The real library's order
// depends on the algorithm that it picks: compare sums of inexact values with a tolerance.)
#include <cstring>
#include <type_traits>

#include "nccl_core.h"

namespace nccl {
namespace {

struct Bfloat16 {
    uint16_t bits;
    Bfloat16() = default;
    Bfloat16(float value) {
        uint32_t u;
        memcpy(&u, &value, sizeof u);
        bool nan = (u & 0x7fffffffu) > 0x7f800000u;
        bits = nan ? 0x7fff : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    operator float() const {
        uint32_t u = static_cast<uint32_t>(bits) << 16;
        float value;
        memcpy(&value, &u, sizeof value);
        return value;
    }
};

// Calls f with a null pointer of the type's C++ counterpart.
template <class F>
void with_type(ncclDataType_t type, F f) {
    switch (type) {
        case ncclInt8: return f(static_cast<int8_t*>(nullptr));
        case ncclUint8: return f(static_cast<uint8_t*>(nullptr));
        case ncclInt32: return f(static_cast<int32_t*>(nullptr));
        case ncclUint32: return f(static_cast<uint32_t*>(nullptr));
        case ncclInt64: return f(static_cast<int64_t*>(nullptr));
        case ncclUint64: return f(static_cast<uint64_t*>(nullptr));
        case ncclFloat16: return f(static_cast<_Float16*>(nullptr));
        case ncclFloat32: return f(static_cast<float*>(nullptr));
        case ncclFloat64: return f(static_cast<double*>(nullptr));
        case ncclBfloat16: return f(static_cast<Bfloat16*>(nullptr));
        default: return;  // fp8 is refused before (reductions of it are not emulated)
    }
}

bool is_integer(ncclDataType_t type) { return type <= ncclUint64; }

template <class T>
T combine(T a, T b, int op) {
    switch (op) {
        case ncclProd: return static_cast<T>(a * b);
        case ncclMax: return a < b ? b : a;
        case ncclMin: return b < a ? b : a;
        default: return static_cast<T>(a + b);  // sum, average, PreMulSum
    }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
    static const size_t sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

void reduce_into(char* acc, const char* other, size_t count, ncclDataType_t type, int op) {
    with_type(type, [&](auto* none) {
        using T = std::remove_pointer_t<decltype(none)>;
        auto* a = reinterpret_cast<T*>(acc);
        auto* b = reinterpret_cast<const T*>(other);
        for (size_t i = 0; i < count; i++) a[i] = combine<T>(a[i], b[i], op);
    });
}

// As the real library: an average of floats multiplies each input by 1/n, one of integers divides
// the sum.
void scale_input(char* data, size_t count, ncclDataType_t type, const Reduction& r, int ranks) {
    bool average = r.op == ncclAvg && !is_integer(type);
    if (!average && r.op != ncclNumOps) return;
    with_type(type, [&](auto* none) {
        using T = std::remove_pointer_t<decltype(none)>;
        auto* values = reinterpret_cast<T*>(data);
        T factor;
        const void* scalar = r.device_scalar ? r.device_scalar : r.scalar;
        if (average) factor = static_cast<T>(1.0 / ranks);
        else memcpy(&factor, scalar, sizeof factor);
        for (size_t i = 0; i < count; i++) values[i] = static_cast<T>(values[i] * factor);
    });
}

void finish_reduction(char* acc, size_t count, ncclDataType_t type, int op, int ranks) {
    if (op != ncclAvg || !is_integer(type)) return;
    with_type(type, [&](auto* none) {
        using T = std::remove_pointer_t<decltype(none)>;
        auto* values = reinterpret_cast<T*>(acc);
        for (size_t i = 0; i < count; i++)
            values[i] = static_cast<T>(values[i] / static_cast<T>(ranks));
    });
}

}  // namespace nccl

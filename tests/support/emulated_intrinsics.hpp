// The AMX and AVX-512 VNNI intrinsics that the native engine uses, in plain C++. Force-included (-include), it runs those paths on
// CPUs that have neither. EMULATE_VNNI and EMULATE_AMX say which.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// After the compiler's own header, which these macros would break.
#if defined(EMULATE_VNNI)
#define LLAMA_REGISTER_BYTES 64
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_AMX)
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif

namespace emulated {

// The low 16 bits of a float that has bfloat16's, widened.
inline float widen(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

#if defined(EMULATE_AMX)
struct Tiles {
    uint16_t row_bytes[8] = {};
    uint8_t rows[8] = {};
    alignas(64) uint8_t data[8][16][64] = {};
};
inline thread_local Tiles tiles;

inline void load_config(const void* config) {
    auto bytes = static_cast<const uint8_t*>(config);
    tiles = Tiles();
    std::memcpy(tiles.row_bytes, bytes + 16, sizeof tiles.row_bytes);
    std::memcpy(tiles.rows, bytes + 48, sizeof tiles.rows);
}
inline void zero(int t) { std::memset(tiles.data[t], 0, sizeof tiles.data[t]); }
inline void load(int t, const void* from, size_t stride) {
    zero(t);
    for (int r = 0; r < tiles.rows[t]; r++)
        std::memcpy(tiles.data[t][r], static_cast<const char*>(from) + r * stride, tiles.row_bytes[t]);
}
inline void store(int t, void* to, size_t stride) {
    for (int r = 0; r < tiles.rows[t]; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, tiles.data[t][r], tiles.row_bytes[t]);
}

// sums [m][n] += a [m][k] b [k / 4][n][4]. Shapes that do not fit raise the CPU's #UD: here they end the process.
template <class A, class B>
inline void multiply_bytes(int sums, int a, int b) {
    if (tiles.rows[b] * 4 != tiles.row_bytes[a] || tiles.rows[sums] != tiles.rows[a] ||
        tiles.row_bytes[sums] != tiles.row_bytes[b])
        __builtin_trap();
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, &tiles.data[sums][m][4 * n], 4);
            for (int k = 0; k < tiles.row_bytes[a]; k++) sum += A(tiles.data[a][m][k]) * B(tiles.data[b][k / 4][4 * n + k % 4]);
            std::memcpy(&tiles.data[sums][m][4 * n], &sum, 4);
        }
}

inline void multiply_bf16(int sums, int a, int b) {
    if (tiles.rows[b] * 4 != tiles.row_bytes[a] || tiles.rows[sums] != tiles.rows[a] ||
        tiles.row_bytes[sums] != tiles.row_bytes[b])
        __builtin_trap();
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
            float sum;
            std::memcpy(&sum, &tiles.data[sums][m][4 * n], 4);
            for (int k = 0; k < tiles.row_bytes[a] / 2; k++) {
                uint16_t x, y;
                std::memcpy(&x, &tiles.data[a][m][2 * k], 2);
                std::memcpy(&y, &tiles.data[b][k / 2][4 * n + k % 2 * 2], 2);
                sum += widen(x) * widen(y);
            }
            std::memcpy(&tiles.data[sums][m][4 * n], &sum, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbusd
#undef _tile_dpbf16ps
// A register that is not a literal does not compile, as with GCC's own macros.
enum Register { tmm0, tmm1, tmm2, tmm3, tmm4, tmm5, tmm6, tmm7 };
#define _tile_loadconfig(config) emulated::load_config(config)
#define _tile_release() (void)0
#define _tile_zero(t) emulated::zero(emulated::tmm##t)
#define _tile_loadd(t, from, stride) emulated::load(emulated::tmm##t, from, stride)
#define _tile_stored(t, to, stride) emulated::store(emulated::tmm##t, to, stride)
#define _tile_dpbssd(sums, a, b) \
    emulated::multiply_bytes<int8_t, int8_t>(emulated::tmm##sums, emulated::tmm##a, emulated::tmm##b)
#define _tile_dpbusd(sums, a, b) \
    emulated::multiply_bytes<uint8_t, int8_t>(emulated::tmm##sums, emulated::tmm##a, emulated::tmm##b)
#define _tile_dpbf16ps(sums, a, b) emulated::multiply_bf16(emulated::tmm##sums, emulated::tmm##a, emulated::tmm##b)
#endif

#if defined(EMULATE_VNNI)
struct Bytes64 {
    uint8_t bytes[64];
    template <class V>
    operator V() const {
        static_assert(sizeof(V) == 64);
        V v;
        std::memcpy(&v, bytes, 64);
        return v;
    }
    Bytes64() = default;
    template <class V>
    Bytes64(const V& v) {
        static_assert(sizeof(V) == 64);
        std::memcpy(bytes, &v, 64);
    }
};
inline Bytes64 splat(int32_t four) {
    Bytes64 result;
    for (int i = 0; i < 16; i++) std::memcpy(result.bytes + 4 * i, &four, 4);
    return result;
}
inline Bytes64 load_64(const void* from) {
    Bytes64 result;
    std::memcpy(result.bytes, from, 64);
    return result;
}
inline Bytes64 add_products(Bytes64 sums, Bytes64 a, Bytes64 b) {
    for (int i = 0; i < 16; i++) {
        int32_t sum;
        std::memcpy(&sum, sums.bytes + 4 * i, 4);
        for (int j = 4 * i; j < 4 * i + 4; j++) sum += int32_t(a.bytes[j]) * int8_t(b.bytes[j]);
        std::memcpy(sums.bytes + 4 * i, &sum, 4);
    }
    return sums;
}
inline Bytes64 add_pairs(Bytes64 sums, Bytes64 a, Bytes64 b) {
    for (int i = 0; i < 16; i++) {
        int32_t sum;
        int16_t x[2], y[2];
        std::memcpy(&sum, sums.bytes + 4 * i, 4);
        std::memcpy(x, a.bytes + 4 * i, 4);
        std::memcpy(y, b.bytes + 4 * i, 4);
        sum += int32_t(x[0]) * y[0] + int32_t(x[1]) * y[1];
        std::memcpy(sums.bytes + 4 * i, &sum, 4);
    }
    return sums;
}
#define __m512i emulated::Bytes64
#define _mm512_set1_epi32(four) emulated::splat(four)
#define _mm512_loadu_si512(from) emulated::load_64(from)
#define _mm512_dpbusd_epi32(sums, a, b) emulated::add_products(sums, a, b)
#define _mm512_dpwssd_epi32(sums, a, b) emulated::add_pairs(sums, a, b)
#endif

}  // namespace emulated

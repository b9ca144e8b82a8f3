// Vectors of 64 bytes on CPUs with smaller registers: two halves, or four quarters. GCC keeps vectors of the language that are
// wider than a register in memory, and its products then take up to ten times as long.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// Bytes of a register. On other CPUs than x86 the compiler splits vectors of 64 bytes: GCC 12 for ARM does not finish compiling
// four quarters.
#if !defined(LLAMA_REGISTER_BYTES)
#if defined(__AVX512F__) || !defined(__x86_64__)
#define LLAMA_REGISTER_BYTES 64
#elif defined(__AVX2__)
#define LLAMA_REGISTER_BYTES 32
#else
#define LLAMA_REGISTER_BYTES 16
#endif
#endif

#define LLAMA_INLINE [[gnu::always_inline]] inline

namespace llama {

template <class T>
struct RegisterOf {
    typedef T Type __attribute__((vector_size(LLAMA_REGISTER_BYTES)));
};
template <class T>
using Register = typename RegisterOf<T>::Type;

// A vector of two halves, each a register or a Split.
template <class H>
struct Split {
    using Half = H;
    Half low, high;

    // The same bits as other lanes.
    template <class Other>
    LLAMA_INLINE explicit operator Split<Other>() const {
        return {(Other)low, (Other)high};
    }
    LLAMA_INLINE auto operator[](int lane) const {
        constexpr int half = sizeof(Half) / sizeof(low[0]);
        return lane < half ? low[lane] : high[lane - half];
    }
};

template <class V>
constexpr bool kIsSplit = false;
template <class Half>
constexpr bool kIsSplit<Split<Half>> = true;

#if LLAMA_REGISTER_BYTES == 64
template <class T>
using VecOf = Register<T>;
#elif LLAMA_REGISTER_BYTES == 32
template <class T>
using VecOf = Split<Register<T>>;
#else
template <class T>
using VecOf = Split<Split<Register<T>>>;
#endif

template <class V>
using LaneOf = std::remove_cvref_t<decltype(std::declval<const V&>()[0])>;

// What a comparison of vectors V gives: lanes of 32 bits, each all ones or all zeros.
template <class V>
struct MaskOf {
    using Type = Register<int32_t>;
};
template <class Half>
struct MaskOf<Split<Half>> {
    using Type = Split<typename MaskOf<Half>::Type>;
};

// Operators of two vectors, and of a vector and a number that its lanes can hold.
#define LLAMA_SPLIT_OPERATOR(op)                                                       \
    template <class Half>                                                              \
    LLAMA_INLINE Split<Half> operator op(const Split<Half>& a, const Split<Half>& b) { \
        return {a.low op b.low, a.high op b.high};                                     \
    }                                                                                  \
    template <class Half, class Number>                                                \
        requires std::is_arithmetic_v<Number>                                          \
    LLAMA_INLINE Split<Half> operator op(const Split<Half>& a, Number b) {             \
        return {a.low op LaneOf<Half>(b), a.high op LaneOf<Half>(b)};                  \
    }                                                                                  \
    template <class Half, class Other>                                                 \
    LLAMA_INLINE Split<Half>& operator op## = (Split<Half> & a, const Other& b) {      \
        return a = a op b;                                                             \
    }
LLAMA_SPLIT_OPERATOR(+)
LLAMA_SPLIT_OPERATOR(-)
LLAMA_SPLIT_OPERATOR(*)
LLAMA_SPLIT_OPERATOR(/)
LLAMA_SPLIT_OPERATOR(&)
LLAMA_SPLIT_OPERATOR(|)
LLAMA_SPLIT_OPERATOR(^)
LLAMA_SPLIT_OPERATOR(<<)
LLAMA_SPLIT_OPERATOR(>>)
#undef LLAMA_SPLIT_OPERATOR

#define LLAMA_SPLIT_COMPARISON(op)                                                               \
    template <class Half>                                                                        \
    LLAMA_INLINE auto operator op(const Split<Half>& a, const Split<Half>& b) {                  \
        using Mask = typename MaskOf<Half>::Type;                                                \
        return Split<Mask>{(Mask)(a.low op b.low), (Mask)(a.high op b.high)};                    \
    }                                                                                            \
    template <class Half, class Number>                                                          \
        requires std::is_arithmetic_v<Number>                                                    \
    LLAMA_INLINE auto operator op(const Split<Half>& a, Number b) {                              \
        using Mask = typename MaskOf<Half>::Type;                                                \
        return Split<Mask>{(Mask)(a.low op LaneOf<Half>(b)), (Mask)(a.high op LaneOf<Half>(b))}; \
    }
LLAMA_SPLIT_COMPARISON(<)
LLAMA_SPLIT_COMPARISON(>)
LLAMA_SPLIT_COMPARISON(<=)
LLAMA_SPLIT_COMPARISON(>=)
LLAMA_SPLIT_COMPARISON(==)
LLAMA_SPLIT_COMPARISON(!=)
#undef LLAMA_SPLIT_COMPARISON

template <class Half>
LLAMA_INLINE Split<Half> operator-(const Split<Half>& v) {
    return {-v.low, -v.high};
}

// f of each pair of registers of two vectors.
template <class V, class F>
LLAMA_INLINE V by_registers(const V& a, const V& b, F&& f) {
    if constexpr (kIsSplit<V>)
        return {by_registers(a.low, b.low, f), by_registers(a.high, b.high, f)};
    else
        return f(a, b);
}

// Lanes of a where the mask's are set, else of b.
template <class Mask, class V>
LLAMA_INLINE V select(const Mask& mask, const V& a, const V& b) {
    if constexpr (kIsSplit<V>)
        return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

template <class V, class T>
LLAMA_INLINE V load_as(const T* p) {
    if constexpr (kIsSplit<V>) {
        using Half = typename V::Half;
        return {load_as<Half>(p), load_as<Half>(reinterpret_cast<const char*>(p) + sizeof(Half))};
    } else {
        V v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
}

template <class V, class T>
LLAMA_INLINE void store_as(T* p, const V& v) {
    if constexpr (kIsSplit<V>) {
        store_as(p, v.low);
        store_as(reinterpret_cast<char*>(p) + sizeof v.low, v.high);
    } else {
        std::memcpy(p, &v, sizeof v);
    }
}

template <class V>
LLAMA_INLINE V splat_as(LaneOf<V> x) {
    if constexpr (kIsSplit<V>) {
        const auto half = splat_as<typename V::Half>(x);
        return {half, half};
    } else if constexpr (sizeof(V) / sizeof x == 16) {
        return V{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
    } else if constexpr (sizeof(V) / sizeof x == 8) {
        return V{x, x, x, x, x, x, x, x};
    } else {
        static_assert(sizeof(V) / sizeof x == 4);
        return V{x, x, x, x};
    }
}

// Integers as floats, or floats as integers, rounded towards zero.
template <class To, class V>
LLAMA_INLINE To convert(const V& v) {
    if constexpr (kIsSplit<V>)
        return {convert<typename To::Half>(v.low), convert<typename To::Half>(v.high)};
    else
        return __builtin_convertvector(v, To);
}

// As many numbers of half the size, with zeros above.
template <class V, class T>
LLAMA_INLINE V load_wide(const T* p) {
    if constexpr (kIsSplit<V>) {
        using Half = typename V::Half;
        return {load_wide<Half>(p), load_wide<Half>(reinterpret_cast<const char*>(p) + sizeof(Half) / 2)};
    } else {
        typedef uint16_t Narrow __attribute__((vector_size(sizeof(V) / 2)));
        return __builtin_convertvector(load_as<Narrow>(p), V);
    }
}

// The lowest bits of each lane of 32 bits, as many as T has.
template <class T, class V>
LLAMA_INLINE void store_narrow(T* p, const V& v) {
    if constexpr (kIsSplit<V>) {
        store_narrow(p, v.low);
        store_narrow(p + sizeof v.low / 4, v.high);
    } else {
        typedef T Narrow __attribute__((vector_size(sizeof(V) / 4 * sizeof(T))));
        const Narrow narrow = __builtin_convertvector(v, Narrow);
        std::memcpy(p, &narrow, sizeof narrow);
    }
}

// Each two neighbours change places.
template <class V>
LLAMA_INLINE V swap_neighbours(const V& v) {
    if constexpr (kIsSplit<V>)
        return {swap_neighbours(v.low), swap_neighbours(v.high)};
    else if constexpr (sizeof(V) == 64)
        return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    else if constexpr (sizeof(V) == 32)
        return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    else
        return __builtin_shufflevector(v, v, 1, 0, 3, 2);
}

// The two in the middle of each four change places.
template <class V>
LLAMA_INLINE V swap_middles(const V& v) {
    if constexpr (kIsSplit<V>)
        return {swap_middles(v.low), swap_middles(v.high)};
    else if constexpr (sizeof(V) == 64)
        return __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    else if constexpr (sizeof(V) == 32)
        return __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7);
    else
        return __builtin_shufflevector(v, v, 0, 2, 1, 3);
}

// Reduces all lanes of 32 bits in a tree: `f` combines the upper half with the lower half until one lane is left.
template <class V, class F>
LLAMA_INLINE auto fold(const V& v, F&& f) {
    if constexpr (kIsSplit<V>) {
        return fold(f(v.low, v.high), f);
    } else {
        V x = v;
        if constexpr (sizeof(V) == 64) {
            x = f(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
            x = f(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
            x = f(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
            x = f(x, __builtin_shufflevector(x, x, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1));
        } else if constexpr (sizeof(V) == 32) {
            x = f(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7));
            x = f(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3));
            x = f(x, __builtin_shufflevector(x, x, 1, 1, 1, 1, 1, 1, 1, 1));
        } else {
            x = f(x, __builtin_shufflevector(x, x, 2, 3, 2, 3));
            x = f(x, __builtin_shufflevector(x, x, 1, 1, 1, 1));
        }
        return x[0];
    }
}

}  // namespace llama

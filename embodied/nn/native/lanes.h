// Numbers of several parallel environments in one vector: arithmetic, and the random numbers of
// `envs/row_rng.py`. A result does not depend on the lane.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint64_t Words __attribute__((vector_size(LANES * 8)));

inline Floats all(float x) { return Floats{} + x; }

inline Floats load(const float* from, int64_t n) {  // the first n; zeros behind them
    Floats x{};
    if (n == LANES)
        std::memcpy(&x, from, sizeof x);
    else
        std::memcpy(&x, from, n * sizeof(float));
    return x;
}

inline void store(float* to, const Floats& x, int64_t n) {
    if (n == LANES)
        std::memcpy(to, &x, sizeof x);
    else
        std::memcpy(to, &x, n * sizeof(float));
}

inline Floats root(Floats x) {
    for (int i = 0; i < LANES; ++i) x[i] = std::sqrt(x[i]);
    return x;
}

inline Floats floats(const Ints& x) { return __builtin_convertvector(x, Floats); }

inline Floats clamped(const Floats& x, float low, float high) {
    const Floats above = x < low ? all(low) : x;
    return above > high ? all(high) : above;
}

// log x of normal numbers; relative error below 2e-7 (Cephes' polynomial).
inline Floats logarithm(const Floats& x) {
    Ints bits;
    std::memcpy(&bits, &x, sizeof x);
    Ints exponent = (bits >> 23) - 126;
    bits = (bits & 0x007fffff) | 0x3f000000;  // the mantissa, in [1/2, 1)
    Floats m;
    std::memcpy(&m, &bits, sizeof m);
    const Ints low = m < 0.70710678f;
    exponent += low;  // -1 where true
    m = (low ? m + m : m) - 1.0f;
    const Floats square = m * m, e = floats(exponent);
    Floats y = all(7.0376836292e-2f);
    for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                          -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        y = y * m + c;
    return m + (y * m * square - 0.5f * square - 2.12194440e-4f * e) + 0.693359375f * e;
}

// sin and cos of angles in [-pi, pi].
inline void sine_cosine(const Floats& angle, Floats& sine, Floats& cosine) {
    const Floats turns = angle * 0.63661977f;  // quarters
    const Ints quarter = __builtin_convertvector(turns + (turns < 0.0f ? all(-0.5f) : all(0.5f)), Ints);
    const Floats q = floats(quarter);
    const Floats r = (angle - q * 1.5703125f) - q * 4.838267948966e-4f, square = r * r;
    const Floats s = r + r * square *
        ((-1.9515295891e-4f * square + 8.3321608736e-3f) * square - 1.6666654611e-1f);
    const Floats c = 1.0f - 0.5f * square + square * square *
        ((2.443315711809948e-5f * square - 1.388731625493765e-3f) * square + 4.166664568298827e-2f);
    const Ints swap = (quarter & 1) != 0;
    const Floats one = swap ? c : s, other = swap ? s : c;
    sine = (quarter & 2) != 0 ? -one : one;
    cosine = ((quarter + 1) & 2) != 0 ? -other : other;
}

// The generators of some environments: their keys, and how many words each has drawn.
struct Random {
    static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
    static constexpr float UNIT = 1.0f / 4294967296.0f;
    Words key{}, drawn{};

    Words word() {  // SplitMix64
        drawn += 1;
        Words z = key + drawn * GOLDEN;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }

    static Ints high(const Words& w) { return __builtin_convertvector(w >> 32, Ints); }
    static Ints low(const Words& w) { return __builtin_convertvector(w, Ints); }
    static Floats open(const Ints& half) {  // in (0, 1]
        return floats(half) * UNIT + (0.5f + 2.98023224e-8f);
    }

    void uniform(Floats* to, int count) {
        const int words = (count + 1) / 2;
        for (int i = 0; i < words; ++i) {
            const Words w = word();
            to[i] = open(high(w));
            if (words + i < count) to[words + i] = open(low(w));
        }
    }

    void normal(Floats* to, int count) {
        const int words = (count + 1) / 2;
        for (int i = 0; i < words; ++i) {
            const Words w = word();
            const Floats radius = root(-2.0f * logarithm(open(high(w))));
            Floats sine, cosine;
            sine_cosine(floats(low(w)) * (6.28318531f * UNIT), sine, cosine);
            to[i] = radius * cosine;
            if (words + i < count) to[words + i] = radius * sine;
        }
    }
};

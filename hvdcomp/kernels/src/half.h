/* Numbers of 16 bits: half precision (in code that needs no special instructions) and bfloat16. */
#ifndef HVD_HALF_H
#define HVD_HALF_H

#include "bits.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

/* The element types of gradients and payloads. The numbers are those of `NARROW` in hvdcomp/kernels/tables.py. */
enum { HVD_FLOAT, HVD_HALF, HVD_BFLOAT16 };

/* The largest finite numbers, as in hvdcomp/kernels/limits.py. */
#define HVD_LARGEST_HALF 65504.0f
#define HVD_LARGEST_BFLOAT16 0x1.fep127f

/* The value, clipped to the largest number of half precision. NaN stays NaN. */
static inline float hvd_within_half(float value) {
    return value > HVD_LARGEST_HALF ? HVD_LARGEST_HALF : value < -HVD_LARGEST_HALF ? -HVD_LARGEST_HALF : value;
}

/* Rounds to nearest, ties to even. The result is inf if the value is too large for half precision. */
static inline uint16_t hvd_to_half(float value) {
    const uint32_t sign = hvd_bits(value) >> 16 & 0x8000u, bits = hvd_bits(value) & 0x7fffffffu;
    if (bits > HVD_INFINITE) return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x47800000u) return (uint16_t)(sign | 0x7c00u); /* 65536 and above */
    if (bits < 0x38800000u) /* below 2**-14: a float whose last bit is worth 2**-24 rounds like half precision */
        return (uint16_t)(sign | (hvd_bits(hvd_of_bits(bits) + 0.5f) - 0x3f000000u));
    const uint32_t rounded = bits + 0xfffu + (bits >> 13 & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

static inline float hvd_from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, bits = (uint32_t)(half & 0x7fffu) << 13;
    if (bits >= 0x0f800000u) return hvd_of_bits(sign | (bits + 0x70000000u)); /* inf and NaN */
    /* Numbers below 2**-14 are computed from integers, because the processor may treat denormal floats as zero. */
    const float small = (float)(int32_t)(half & 0x3ffu) * 0x1p-24f;
    return hvd_of_bits(sign | (bits < 0x00800000u ? hvd_bits(small) : bits + 0x38000000u));
}

static inline void hvd_to_halves(const float *restrict x, int64_t length, uint16_t *restrict out) {
    int64_t i = 0;
#if defined __AVX512F__
    for (; i + 16 <= length; i += 16)
        _mm256_storeu_si256(
            (__m256i *)(void *)(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT)
        );
#elif defined __F16C__
    for (; i + 8 <= length; i += 8)
        _mm_storeu_si128(
            (__m128i *)(void *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT)
        );
#endif
    for (; i < length; i++) out[i] = hvd_to_half(x[i]);
}

static inline void hvd_from_halves(const uint16_t *restrict in, int64_t length, float *restrict x) {
    int64_t i = 0;
#if defined __AVX512F__
    for (; i + 16 <= length; i += 16)
        _mm512_storeu_ps(x + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(in + i))));
#elif defined __F16C__
    for (; i + 8 <= length; i += 8)
        _mm256_storeu_ps(x + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(in + i))));
#endif
    for (; i < length; i++) x[i] = hvd_from_half(in[i]);
}

/* Rounds to nearest, ties to even. */
static inline uint16_t hvd_to_bfloat16(float value) {
    const uint32_t bits = hvd_bits(value), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > HVD_INFINITE ? bits >> 16 | 0x40u : rounded);
}

static inline float hvd_from_bfloat16(uint16_t number) { return hvd_of_bits((uint32_t)number << 16); }

static inline void hvd_to_bfloat16s(const float *restrict x, int64_t length, uint16_t *restrict out) {
    for (int64_t i = 0; i < length; i++) out[i] = hvd_to_bfloat16(x[i]);
}

static inline void hvd_from_bfloat16s(const uint16_t *restrict in, int64_t length, float *restrict x) {
    for (int64_t i = 0; i < length; i++) x[i] = hvd_from_bfloat16(in[i]);
}

/* Converts 16-bit numbers of `type` to floats, and floats to such numbers. */
static inline void hvd_widen(const uint16_t *restrict in, int64_t length, int32_t type, float *restrict x) {
    if (type == HVD_HALF) hvd_from_halves(in, length, x);
    else hvd_from_bfloat16s(in, length, x);
}

static inline void hvd_narrow(const float *restrict x, int64_t length, int32_t type, uint16_t *restrict out) {
    if (type == HVD_HALF) hvd_to_halves(x, length, out);
    else hvd_to_bfloat16s(x, length, out);
}

/* The nearest finite 16-bit number; NaN for NaN. */
static inline uint16_t hvd_nearest_finite(float value, int32_t type) {
    const float bound = type == HVD_HALF ? HVD_LARGEST_HALF : HVD_LARGEST_BFLOAT16;
    uint16_t found;
    value = value > bound ? bound : value < -bound ? -bound : value;
    hvd_narrow(&value, 1, type, &found);
    return found;
}

static inline float hvd_of_16_bits(uint16_t number, int32_t type) {
    float value;
    hvd_widen(&number, 1, type, &value);
    return value;
}

#endif

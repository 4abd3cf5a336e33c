/* Half precision without instructions for it, for the few numbers that sparsifiers send: the same on every machine. */
#ifndef HVD_HALF_H
#define HVD_HALF_H

#include "bucket.h"

#define HVD_LARGEST_HALF 65504.0f

/* The value, or where half precision ends; NaN stays. */
static inline float hvd_within_half(float value) {
    return value > HVD_LARGEST_HALF ? HVD_LARGEST_HALF : value < -HVD_LARGEST_HALF ? -HVD_LARGEST_HALF : value;
}

/* Rounded to nearest, ties to even; what is beyond half precision becomes inf. */
static inline uint16_t hvd_to_half(float value) {
    const uint32_t sign = hvd_bits(value) >> 16 & 0x8000u, bits = hvd_bits(value) & 0x7fffffffu;
    if (bits > HVD_INFINITE) return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x47800000u) return (uint16_t)(sign | 0x7c00u); /* 65536 and above */
    if (bits < 0x38800000u) /* below 2**-14: a float whose last bit is worth 2**-24 rounds as half precision does */
        return (uint16_t)(sign | (hvd_bits(hvd_of_bits(bits) + 0.5f) - 0x3f000000u));
    const uint32_t rounded = bits + 0xfffu + (bits >> 13 & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

static inline float hvd_from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, bits = (uint32_t)(half & 0x7fffu) << 13;
    if (bits >= 0x0f800000u) return hvd_of_bits(sign | (bits + 0x70000000u)); /* inf and NaN */
    /* 2**112 makes up for the difference of the exponents, of small numbers too. */
    return hvd_of_bits(sign | hvd_bits(hvd_of_bits(bits) * 0x1p112f));
}

#endif

/* Floats of 8 bits (Micikevicius et al. 2022, arXiv:2209.05433): a sign, an exponent, and a mantissa of 3 bits (E4M3)
 * or 2 (E5M2). hvdcomp/compressors/quantization_blocks.py does the same with array functions. */
#ifndef HVD_FLOAT8_H
#define HVD_FLOAT8_H

#include "bucket.h"
#include "lanes.h"

HVD_INLINE float hvd_largest_float8(int mantissa) { return mantissa == 3 ? 448 : 57344; }

/* The float32 bits of the smallest normal 8-bit float. */
HVD_INLINE uint32_t hvd_least_float8(int mantissa) { return (mantissa == 3 ? 127u - 6 : 127u - 14) << 23; }

/* The code of a number. NaN, and numbers beyond the largest 8-bit float, get the code of the largest.
 *
 * Between one power of two and the next, and among subnormal numbers, codes are equally far apart. The distance of a
 * number from the power of two below it, in units of the distance between codes, is rounded and added to the code of
 * the power.
 *
 * noise: 23 random bits; ignored if `nearest`.
 */
HVD_INLINE uint8_t hvd_to_float8(float value, int mantissa, int nearest, uint32_t noise) {
    const float largest = hvd_largest_float8(mantissa);
    const uint32_t least = hvd_least_float8(mantissa);
    float magnitude = hvd_of_bits(hvd_bits(value) & 0x7fffffffu);
    magnitude = magnitude < largest ? magnitude : largest;
    uint32_t power = hvd_bits(magnitude) & HVD_INFINITE, code;
    power = power > least ? power : least;
    if (nearest) { /* the last bit of this sum is worth one distance; ties go to the even code */
        const uint32_t power_of_sum = power + ((23u - (uint32_t)mantissa) << 23);
        code = hvd_bits(magnitude + hvd_of_bits(power_of_sum)) - power_of_sum;
    } else { /* 2**23 times the exact number of distances */
        const float factor = hvd_of_bits(((277u + (uint32_t)mantissa) << 23) - power);
        code = ((uint32_t)(int32_t)(magnitude * factor) + noise) >> 23;
    }
    code += (power - least) >> (23 - mantissa);
    return (uint8_t)(code | (hvd_bits(value) >> 24 & 0x80u));
}

HVD_INLINE float hvd_from_float8(uint8_t code, int mantissa) {
    const uint32_t least = hvd_least_float8(mantissa), magnitude = code & 0x7fu;
    const float small = (float)(int32_t)magnitude * hvd_of_bits(least - ((uint32_t)mantissa << 23));
    const float whole = hvd_of_bits((magnitude << (23 - mantissa)) + least - (1u << 23));
    const float value = magnitude < 1u << mantissa ? small : whole;
    return hvd_of_bits(hvd_bits(value) | (code & 0x80u) << 24);
}

#endif

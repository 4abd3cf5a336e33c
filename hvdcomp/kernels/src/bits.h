/* The bits of floats. */
#ifndef HVD_BITS_H
#define HVD_BITS_H

#include <stdint.h>
#include <string.h>

#define HVD_INFINITE 0x7f800000u /* the magnitude bits of inf; the bits of NaN are higher */

static inline uint32_t hvd_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float hvd_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif

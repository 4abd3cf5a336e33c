/* Random words by key and index: `random_words` of hvdcomp/compressors/randomness.py, which says why they are random. */
#ifndef HVDCOMP_RANDOMNESS_H
#define HVDCOMP_RANDOMNESS_H

#include <stdint.h>

static inline uint32_t hvd_word(uint32_t index, uint64_t key) {
    uint32_t word = index * 0x9e3779b9u + (uint32_t)key;
    word = (word ^ word >> 16) * 0x21f0aaadu;
    return (word ^ word >> 15 ^ (uint32_t)(key >> 32)) * 0xd35a2d97u;
}

#endif

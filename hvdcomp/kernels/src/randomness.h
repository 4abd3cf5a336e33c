/* Random words for a key and an index: `random_words` in hvdcomp/compressors/randomness.py, which explains why they are
 * random. */
#ifndef HVDCOMP_RANDOMNESS_H
#define HVDCOMP_RANDOMNESS_H

#include <stdint.h>

/* The input of a random word increases by this number from one index to the next. */
#define HVD_WEYL 0x9e3779b9u

static inline uint32_t hvd_weyl(int64_t index, uint64_t key) { return (uint32_t)index * HVD_WEYL + (uint32_t)key; }

static inline uint32_t hvd_word(uint32_t weyl, uint64_t key) {
    const uint32_t word = (weyl ^ weyl >> 16) * 0x21f0aaadu;
    return (word ^ word >> 15 ^ (uint32_t)(key >> 32)) * 0xd35a2d97u;
}

#endif

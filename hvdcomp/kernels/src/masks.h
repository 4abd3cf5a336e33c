/* Compares floats; the results are bit masks. */
#ifndef HVD_MASKS_H
#define HVD_MASKS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

/* For 64 floats: bit i is set if x[i] >= 0 or, if `strictly`, x[i] > 0. It is not set for NaN. */
static inline uint64_t hvd_positive64(const float *x, int strictly) {
    uint64_t mask = 0;
#if defined(__AVX512F__)
    for (int i = 0; i < 4; i++) {
        __m512 v = _mm512_loadu_ps(x + 16 * i);
        __mmask16 part = strictly ? _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GT_OQ)
                                  : _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GE_OQ);
        mask |= (uint64_t)part << (16 * i);
    }
#elif defined(__AVX2__)
    for (int i = 0; i < 8; i++) {
        __m256 v = _mm256_loadu_ps(x + 8 * i);
        __m256 part = strictly ? _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GT_OQ)
                               : _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GE_OQ);
        mask |= (uint64_t)(uint32_t)_mm256_movemask_ps(part) << (8 * i);
    }
#else
    for (int i = 0; i < 64; i++) mask |= (uint64_t)(strictly ? x[i] > 0 : x[i] >= 0) << i;
#endif
    return mask;
}

/* The same mask for `length` floats, at most 64. The other bits are 0. */
static inline uint64_t hvd_positive(const float *x, int64_t length, int strictly) {
    if (length >= 64) return hvd_positive64(x, strictly);
    uint64_t mask = 0;
    for (int64_t i = 0; i < length; i++) mask |= (uint64_t)(strictly ? x[i] > 0 : x[i] >= 0) << i;
    return mask;
}

/* For `length` floats, at most 64: bit i is set if x[i] is not zero. It is set for NaN. */
static inline uint64_t hvd_nonzero(const float *x, int64_t length) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < length; i++) mask |= (uint64_t)(x[i] != 0) << i;
    return mask;
}

/* For 64 floats: bit i is set if the magnitude of x[i], as bits, reaches `least`, which is below 2**31. */
static inline uint64_t hvd_reaching64(const float *x, uint32_t least) {
    uint64_t mask = 0;
#if defined(__AVX512F__)
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), bound = _mm512_set1_epi32((int32_t)least);
    for (int i = 0; i < 4; i++) {
        const __m512i v = _mm512_and_si512(_mm512_loadu_si512(x + 16 * i), magnitude);
        mask |= (uint64_t)_mm512_cmpge_epi32_mask(v, bound) << (16 * i);
    }
#elif defined(__AVX2__)
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), bound = _mm256_set1_epi32((int32_t)least - 1);
    for (int i = 0; i < 8; i++) {
        const __m256i v = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 8 * i)), magnitude);
        const __m256 part = _mm256_castsi256_ps(_mm256_cmpgt_epi32(v, bound));
        mask |= (uint64_t)(uint32_t)_mm256_movemask_ps(part) << (8 * i);
    }
#else
    for (int i = 0; i < 64; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        mask |= (uint64_t)((bits & 0x7fffffffu) >= least) << i;
    }
#endif
    return mask;
}

/* Writes the low `length` bits of a mask as whole bytes. The mask's other bits must be 0. */
static inline void hvd_store_bits(uint8_t *bytes, uint64_t mask, int64_t length) {
    if (length >= 64) memcpy(bytes, &mask, 8);
    else
        for (int64_t i = 0; 8 * i < length; i++) bytes[i] = (uint8_t)(mask >> (8 * i));
}

/* Reads the next `length` bits, at most 64, of packed bits. The result's other bits are undefined. */
static inline uint64_t hvd_load_bits(const uint8_t *bytes, int64_t length) {
    uint64_t mask = 0;
    memcpy(&mask, bytes, length >= 64 ? 8 : (size_t)(length + 7) / 8);
    return mask;
}

#endif

/* EDEN: blocks of elements are rotated at random, and each element is then rounded to one of a few levels
 * (hvdcomp/compressors/quantization_rotated.py).
 *
 * A tensor's codes of `count` bits begin at `codes` of a payload. The last block is filled up, so there is a code for
 * each element of a whole number of blocks. The scales, one float for each block, begin at `scales`. The lowest bit of
 * a code is a sign; the bits above it are the number of a level. */
#include <math.h>

#include "lanes.h"
#include "make.h"
#include "packing.h"
#include "put.h"
#include "quant.h"

typedef hvd_bits_vector places;
typedef uint32_t unsigned_places __attribute__((vector_size(4 * HVD_WIDTH)));

struct job {
    const hvd_bucket *bucket;
    uint8_t *payload;
    const uint8_t *payloads;
    int64_t ranks, row; /* row: bytes of a rank's payload */
    int64_t block;      /* number of elements of a block, a power of two */
    const float *levels;
    int32_t large;      /* whether results are written past the caches */
};

#define LONGEST 1024 /* largest block */
#define ONE 127      /* exponent bits of 1 */
#define AT_ONCE 8    /* number of vectors that are rotated together */
#define LEVELS 8     /* number of places for the levels of codes with one number of bits */

/* The levels of codes with `bits` bits, and the borders between the levels. */
static inline const float *levels_of(const struct job *job, int64_t bits) { return job->levels + LEVELS * bits; }

static inline const float *borders_of(const struct job *job, int64_t bits) { return job->levels + LEVELS * (5 + bits); }

/* Multiplies elements by their random signs. The elements begin at number `first` of the 32 that share a random
 * word. */
HVD_INLINE hvd_vector with_signs(hvd_vector x, uint32_t word, uint32_t first) {
#if defined __AVX512F__
    const __m512i bits = (__m512i)x;
    return (hvd_vector)_mm512_mask_xor_epi32(bits, (__mmask16)(word >> first), bits, _mm512_set1_epi32(INT32_MIN));
#else
    unsigned_places place;
    for (uint32_t i = 0; i < HVD_WIDTH; i++) place[i] = first + i;
    return (hvd_vector)((places)x ^ (places)((word >> place) << 31));
#endif
}

/* The random words for a tensor's elements from `start` on. Each word has the signs of 32 elements. */
static void draw_words(int64_t start, int64_t length, uint64_t key, uint32_t *restrict out) {
    uint32_t weyl = hvd_weyl(start / 32, key);
    for (int64_t i = 0; i < length / 32; i++, weyl += HVD_WEYL) out[i] = hvd_word(weyl, key);
}

/* The elements of a vector at places that are known at compile time, or the elements of a table. */
HVD_INLINE hvd_vector taken(hvd_vector v, places from) {
#ifdef __clang__
    hvd_vector result;
    for (int i = 0; i < HVD_WIDTH; i++) result[i] = v[from[i]];
    return result;
#else
    return __builtin_shuffle(v, from);
#endif
}

/* Sums and differences of elements that are `apart` from each other, all in one vector. Products with 1 and -1 are
 * exact, so a fused operation gives the same result. */
HVD_INLINE hvd_vector butterfly_within(hvd_vector v, int apart) {
    places other;
    hvd_vector sign;
    for (int i = 0; i < HVD_WIDTH; i++) other[i] = i ^ apart, sign[i] = i & apart ? -1 : 1;
#if defined __AVX512F__
    return (hvd_vector)_mm512_fmadd_ps((__m512)v, (__m512)sign, (__m512)taken(v, other));
#elif defined __AVX2__
    return (hvd_vector)_mm256_fmadd_ps((__m256)v, (__m256)sign, (__m256)taken(v, other));
#else
    return taken(v, other) + v * sign;
#endif
}

/* All butterflies within a vector, which combine the nearest elements. */
HVD_INLINE hvd_vector butterflies_within(hvd_vector v) {
    v = butterfly_within(v, 1);
    v = butterfly_within(v, 2);
    if (HVD_WIDTH > 4) v = butterfly_within(v, 4);
    if (HVD_WIDTH > 8) v = butterfly_within(v, 8);
    return v;
}

/* Sums of a vector's lanes in double precision. */
#if defined __AVX512F__
typedef struct { __m512d low, high; } sums_vector;
#elif defined __AVX2__
typedef struct { __m256d low, high; } sums_vector;
#else
typedef struct { double lanes[HVD_WIDTH]; } sums_vector;
#endif

/* Adds the products of two vectors of floats, which are exact in double precision. */
HVD_INLINE void add_products(sums_vector *sums, hvd_vector x, hvd_vector y) {
#if defined __AVX512F__
    const __m256 x_low = _mm512_castps512_ps256((__m512)x), x_high = _mm512_extractf32x8_ps((__m512)x, 1);
    const __m256 y_low = _mm512_castps512_ps256((__m512)y), y_high = _mm512_extractf32x8_ps((__m512)y, 1);
    sums->low = _mm512_fmadd_pd(_mm512_cvtps_pd(x_low), _mm512_cvtps_pd(y_low), sums->low);
    sums->high = _mm512_fmadd_pd(_mm512_cvtps_pd(x_high), _mm512_cvtps_pd(y_high), sums->high);
#elif defined __AVX2__
    const __m128 x_low = _mm256_castps256_ps128((__m256)x), x_high = _mm256_extractf128_ps((__m256)x, 1);
    const __m128 y_low = _mm256_castps256_ps128((__m256)y), y_high = _mm256_extractf128_ps((__m256)y, 1);
    sums->low = _mm256_fmadd_pd(_mm256_cvtps_pd(x_low), _mm256_cvtps_pd(y_low), sums->low);
    sums->high = _mm256_fmadd_pd(_mm256_cvtps_pd(x_high), _mm256_cvtps_pd(y_high), sums->high);
#else
    for (int i = 0; i < HVD_WIDTH; i++) sums->lanes[i] += (double)x[i] * (double)y[i];
#endif
}

static inline double sum_of(const sums_vector sums[HVD_PARTS]) {
    double lanes[HVD_LANES];
    memcpy(lanes, sums, sizeof lanes);
    return hvd_sum_of_lanes(lanes);
}

/* Butterflies among vectors. The number of vectors must be a power of two. */
HVD_INLINE void butterflies_among(hvd_vector *v, int count) {
    for (int half = 1; half < count; half *= 2)
        for (int k = 0; k < count; k++)
            if (!(k & half)) {
                const hvd_vector a = v[k], b = v[k + half];
                v[k] = a + b, v[k + half] = a - b;
            }
}

/* Butterflies of elements that are `apart`, 2 `apart` and so on from each other, with `count` vectors at a time. The
 * result is multiplied by the signs in `words`, unless `words` is NULL. */
HVD_INLINE void butterflies(float *x, int64_t length, int64_t apart, int count, const uint32_t *words) {
    for (int64_t start = 0; start < length; start += count * apart)
        for (int64_t i = start; i < start + apart; i += HVD_WIDTH) {
            hvd_vector v[AT_ONCE];
            for (int k = 0; k < count; k++) v[k] = hvd_load(x + i + k * apart);
            butterflies_among(v, count);
            for (int k = 0; k < count; k++) {
                const int64_t place = i + k * apart;
                hvd_store(x + place, words ? with_signs(v[k], words[place / 32], place % 32) : v[k]);
            }
        }
}

/* The rest of a Walsh-Hadamard transform, beginning with elements that are `apart` from each other. */
HVD_INLINE void rotate_rest(float *x, int64_t length, int64_t apart, const uint32_t *words) {
    for (; AT_ONCE * apart < length; apart *= AT_ONCE) butterflies(x, length, apart, AT_ONCE, NULL);
    if (2 * apart == length) butterflies(x, length, apart, 2, words);
    else if (4 * apart == length) butterflies(x, length, apart, 4, words);
    else butterflies(x, length, apart, AT_ONCE, words);
}

/* The Walsh-Hadamard transform of a block, which is then multiplied by the signs in `words`. The order of operations is
 * that of `hadamard` in hvdcomp/arrays/numpy_arrays.py. */
static void rotate_and_flip(float *x, int64_t length, const uint32_t *words) {
    for (int64_t i = 0; i < length; i += AT_ONCE * HVD_WIDTH) {
        hvd_vector v[AT_ONCE];
        for (int k = 0; k < AT_ONCE; k++) v[k] = butterflies_within(hvd_load(x + i + k * HVD_WIDTH));
        butterflies_among(v, AT_ONCE);
        for (int k = 0; k < AT_ONCE; k++) hvd_store(x + i + k * HVD_WIDTH, v[k]);
    }
    rotate_rest(x, length, AT_ONCE * HVD_WIDTH, words);
}

/* Multiplies a block x by the signs in `words`, and writes the Walsh-Hadamard transform of the product to z. Returns
 * the sum of squares of x.
 *
 * ahead: memory that is prefetched meanwhile, `step` bytes for every 32 elements.
 */
static double flip_and_rotate(
    const float *restrict x, int64_t length, const uint32_t *words, float *restrict z, const char *ahead, int64_t step
) {
    sums_vector sums[HVD_PARTS];
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < length; i += AT_ONCE * HVD_WIDTH) {
        hvd_vector v[AT_ONCE];
        for (int k = 0; k < AT_ONCE; k++) {
            const int64_t place = i + k * HVD_WIDTH;
            const hvd_vector value = hvd_load(x + place);
            add_products(sums + k % HVD_PARTS, value, value);
            v[k] = butterflies_within(with_signs(value, words[place / 32], place % 32));
        }
        butterflies_among(v, AT_ONCE);
        for (int k = 0; k < AT_ONCE; k++) hvd_store(z + i + k * HVD_WIDTH, v[k]);
        for (int64_t j = 0; j < AT_ONCE * HVD_WIDTH / 32 * step; j += 64) __builtin_prefetch(ahead + i / 32 * step + j);
    }
    rotate_rest(z, length, AT_ONCE * HVD_WIDTH, NULL);
    return sum_of(sums);
}

HVD_INLINE places load_bytes(const uint8_t *codes) {
#if defined __AVX512F__
    return (places)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i_u *)codes));
#elif defined __AVX2__
    return (places)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i_u *)codes));
#else
    places result;
    for (int i = 0; i < HVD_WIDTH; i++) result[i] = codes[i];
    return result;
#endif
}

HVD_INLINE void store_bytes(uint8_t *codes, places vector) {
#if defined __AVX512F__
    _mm_storeu_si128((__m128i_u *)codes, _mm512_cvtepi32_epi8((__m512i)vector));
#elif defined __AVX2__
    const __m256i low = _mm256_shuffle_epi8((__m256i)vector, _mm256_set1_epi32(0x0c080400)); /* of each half */
    const int32_t halves[2] = {_mm256_extract_epi32(low, 0), _mm256_extract_epi32(low, 4)};
    memcpy(codes, halves, sizeof halves);
#else
    for (int i = 0; i < HVD_WIDTH; i++) codes[i] = (uint8_t)vector[i];
#endif
}

#define TOGETHER 8 /* vectors of codes whose elements are `FAR` apart: these codes share packed bytes (packing.h) */
#define FAR (HVD_GROUP / TOGETHER)

/* Describes where a tensor's codes of `count` bits are, and the number of elements in its whole blocks. */
struct codes {
    uint8_t *packed;
    int64_t size;
    int bits;
};

/* The codes that remain after a plane of `width` bits. */
HVD_INLINE struct codes next_plane(struct codes codes, int width) {
    codes.packed += codes.size * width / 8;
    return codes;
}

/* The bytes of a plane that hold the codes of the elements start + k * FAR, for k below TOGETHER. Byte b has the codes
 * for which k % width = b. */
HVD_INLINE uint8_t *bytes_of(struct codes codes, int64_t start, int width, int b) {
    return codes.packed + start / HVD_GROUP * HVD_GROUP * width / 8 + start % HVD_GROUP + b * FAR;
}

HVD_INLINE struct codes put_plane(
    struct codes to, int64_t start, const places codes[TOGETHER], int width, int shift
) {
    if (!(to.bits & width)) return to;
    for (int b = 0; b < width; b++) {
        places word = codes[b] >> shift & ((1 << width) - 1);
        for (int k = b + width; k < TOGETHER; k += width)
            word |= (codes[k] >> shift & ((1 << width) - 1)) << k / width * width;
        store_bytes(bytes_of(to, start, width, b), word);
    }
    return next_plane(to, width);
}

/* Writes the codes of the elements start, start + FAR, ... */
HVD_INLINE void put_codes(struct codes to, int64_t start, const places codes[TOGETHER]) {
    to = put_plane(to, start, codes, 4, 0);
    to = put_plane(to, start, codes, 2, 0);
    put_plane(to, start, codes, 1, to.bits - 1);
}

/* Adds a plane's bits to codes whose bits from `shift` on are zero. */
HVD_INLINE struct codes get_plane(struct codes from, int64_t start, places codes[TOGETHER], int width, int shift) {
    if (!(from.bits & width)) return from;
    for (int b = 0; b < width; b++) {
        const places word = load_bytes(bytes_of(from, start, width, b));
        for (int k = b; k < TOGETHER; k += width)
            codes[k] |= (word >> k / width * width & ((1 << width) - 1)) << shift;
    }
    return next_plane(from, width);
}

/* Reads codes that `put_codes` has written. */
HVD_INLINE void get_codes(struct codes from, int64_t start, places codes[TOGETHER]) {
    for (int k = 0; k < TOGETHER; k++) codes[k] = (places){0};
    from = get_plane(from, start, codes, 4, 0);
    from = get_plane(from, start, codes, 2, 0);
    get_plane(from, start, codes, 1, from.bits - 1);
}

HVD_INLINE hvd_vector choose(places condition, hvd_vector yes, hvd_vector no) {
    return (hvd_vector)(((places)yes & condition) | ((places)no & ~condition));
}

/* Where a magnitude is above a border, sets the level to `higher` and goes to the next code. */
HVD_INLINE void raise_level(hvd_vector magnitude, float border, float higher, hvd_vector *level, places *code) {
#if defined __AVX512F__
    const __mmask16 above = _mm512_cmp_ps_mask((__m512)magnitude, _mm512_set1_ps(border), _CMP_GT_OQ);
    *level = (hvd_vector)_mm512_mask_mov_ps((__m512)*level, above, _mm512_set1_ps(higher));
    *code = (places)_mm512_mask_add_epi32((__m512i)*code, above, (__m512i)*code, _mm512_set1_epi32(2));
#else
    const places above = magnitude > hvd_all(border);
    *level = choose(above, hvd_all(higher), *level);
    *code -= above + above;
#endif
}

/* Computes the codes of a block whose root mean square is given. Returns the sum of the products of its magnitudes and
 * their levels. Eight products at a time are added as floats, because converting all of them to double precision would
 * take longer than the rest. `_dots` in hvdcomp/compressors/quantization_rotated.py does the same. */
HVD_INLINE double encode_levels(
    const float *restrict z, int64_t length, const float *levels, const float *borders, float rms, struct codes to,
    int64_t start
) {
    sums_vector sums[HVD_PARTS];
    memset(sums, 0, sizeof sums);
    for (int64_t group = 0; group < length; group += HVD_GROUP)
        for (int64_t i = group; i < group + FAR; i += HVD_WIDTH) {
            hvd_vector products[TOGETHER];
            places codes[TOGETHER];
            for (int k = 0; k < TOGETHER; k++) {
                const hvd_vector value = hvd_load(z + i + k * FAR);
                const hvd_vector magnitude = (hvd_vector)((places)value & INT32_MAX);
                hvd_vector level = hvd_all(levels[0]);
                codes[k] = (places)(value < 0) & 1;
                for (int above = 1; above < 1 << (to.bits - 1); above++)
                    raise_level(magnitude, rms * borders[above - 1], levels[above], &level, codes + k);
                products[k] = magnitude * level;
            }
            put_codes(to, start + i, codes);
            for (int half = TOGETHER / 2; half; half /= 2)
                for (int k = 0; k < half; k++) products[k] += products[k + half];
            add_products(sums + i / HVD_WIDTH % HVD_PARTS, products[0], hvd_all(1));
        }
    return sum_of(sums);
}

/* Computes the codes of a rotated block, and returns its scale. The sum of squares is that of the block before the
 * rotation. */
static float encode(const struct job *job, const float *z, struct codes to, int64_t start, double squares) {
    const float rms = (float)sqrt(squares), *levels = levels_of(job, to.bits), *borders = borders_of(job, to.bits);
    double product;
    switch (to.bits) { /* makes the number of bits a compile-time constant */
    case 1: to.bits = 1, product = encode_levels(z, job->block, levels, borders, rms, to, start); break;
    case 2: to.bits = 2, product = encode_levels(z, job->block, levels, borders, rms, to, start); break;
    case 3: to.bits = 3, product = encode_levels(z, job->block, levels, borders, rms, to, start); break;
    default: to.bits = 4, product = encode_levels(z, job->block, levels, borders, rms, to, start);
    }
    if (rms <= HVD_SMALLEST_SCALE) return 0;
    return (float)(squares * (product > 0 ? 1 / product : 0) * (1 + 0 * product)); /* NaN if the product is infinite */
}

/* Whether a vector has room for the values of all codes of this number of bits. A vector with eight or more places
 * always has room for the magnitudes. */
HVD_INLINE int holds_values(int bits) { return HVD_WIDTH >= LEVELS && HVD_WIDTH >= 1 << bits; }

/* A table of the values of codes or, if a vector has no room for these, of the magnitudes of levels. The table repeats
 * them to fill the vector. */
HVD_INLINE hvd_vector table_of(int bits, const float *levels, float scale) {
    const int count = 1 << (bits - 1);
    hvd_vector table;
    for (int i = 0; i < HVD_WIDTH; i++)
        if (holds_values(bits)) table[i] = levels[i / 2 % count] * (i & 1 ? -scale : scale);
        else table[i] = levels[i % count] * scale;
    return table;
}

HVD_INLINE hvd_vector values_of(places codes, int bits, hvd_vector table, const float *levels, float scale) {
    if (holds_values(bits)) return taken(table, codes);
    hvd_vector magnitude = hvd_all(table[0]);
    if (HVD_WIDTH >= LEVELS) magnitude = taken(table, codes >> 1);
    else
        for (int level = 1; level < 1 << (bits - 1); level++)
            magnitude = choose(codes >= 2 * level, hvd_all(levels[level] * scale), magnitude);
    return (hvd_vector)((places)magnitude ^ codes << 31);
}

/* Writes the values of a block's codes, or adds them. */
HVD_INLINE void put_values(
    float *restrict sum, struct codes from, int64_t start, int64_t length, const float *levels, float scale, int add
) {
    const hvd_vector table = table_of(from.bits, levels, scale);
    for (int64_t group = 0; group < length; group += HVD_GROUP)
        for (int64_t i = group; i < group + FAR; i += HVD_WIDTH) {
            places codes[TOGETHER];
            get_codes(from, start + i, codes);
            for (int k = 0; k < TOGETHER; k++) {
                hvd_vector value = values_of(codes[k], from.bits, table, levels, scale);
                if (add) value += hvd_load(sum + i + k * FAR);
                hvd_store(sum + i + k * FAR, value);
            }
        }
}

static void values(const struct job *job, float *sum, struct codes from, int64_t start, float scale, int add) {
    const float *levels = levels_of(job, from.bits);
    const int64_t length = job->block;
    switch (2 * from.bits + add) { /* as in `encode` */
    case 2: from.bits = 1, put_values(sum, from, start, length, levels, scale, 0); break;
    case 3: from.bits = 1, put_values(sum, from, start, length, levels, scale, 1); break;
    case 4: from.bits = 2, put_values(sum, from, start, length, levels, scale, 0); break;
    case 5: from.bits = 2, put_values(sum, from, start, length, levels, scale, 1); break;
    case 6: from.bits = 3, put_values(sum, from, start, length, levels, scale, 0); break;
    case 7: from.bits = 3, put_values(sum, from, start, length, levels, scale, 1); break;
    case 8: from.bits = 4, put_values(sum, from, start, length, levels, scale, 0); break;
    default: from.bits = 4, put_values(sum, from, start, length, levels, scale, 1);
    }
}

/* Computes the scales of a block's elements from the running means of their squares: 1 for the largest, and powers of
 * two for the others, as in `_scales` in hvdcomp/compressors/quantization_rotated.py. */
static void make_scales(const float *restrict squares, int64_t length, float *restrict scales) {
    int32_t largest = 0;
    for (int64_t i = 0; i < length; i++) {
        const int32_t exponent = (int32_t)hvd_bits(squares[i]) >> 23;
        largest = exponent > largest ? exponent : largest;
    }
    for (int64_t i = 0; i < length; i++) {
        const int32_t below = (largest - ((int32_t)hvd_bits(squares[i]) >> 23) + 1) >> 1;
        const int32_t halvings = below < HVD_MOST_HALVINGS ? below : HVD_MOST_HALVINGS;
        scales[i] = hvd_of_bits((uint32_t)(ONE - halvings) << 23);
    }
}

/* Divides elements by their scales. The inverse of a power of two is exact. */
static void divide(const float *restrict x, int64_t length, const float *restrict scales, float *restrict out) {
    for (int64_t i = 0; i < length; i++) out[i] = x[i] * hvd_of_bits(((uint32_t)(2 * ONE) << 23) - hvd_bits(scales[i]));
}

static void multiply(float *restrict x, int64_t length, const float *restrict scales) {
    for (int64_t i = 0; i < length; i++) x[i] *= scales[i];
}

/* Computes the next running means of squares from the means over the ranks. A NaN stays NaN. */
static void add_squares(
    const float *restrict means, int64_t length, const float *restrict squares, float *restrict next
) {
    for (int64_t i = 0; i < length; i++) {
        const float low = means[i] < -HVD_LARGEST_SQUARED ? -HVD_LARGEST_SQUARED : means[i];
        const float limited = low > HVD_LARGEST_SQUARED ? HVD_LARGEST_SQUARED : low;
        next[i] = squares[i] * HVD_SQUARES_KEPT + limited * limited * HVD_SQUARES_ADDED;
    }
}

/* The codes of a tensor in a payload. */
static inline struct codes codes_of(const struct job *job, const hvd_segment *s, uint8_t *payload) {
    const int64_t blocks = (s->size + job->block - 1) / job->block;
    return (struct codes){payload + s->codes, blocks * job->block, (int)s->count};
}

/* The end of the part of a tensor that begins at `start` and belongs to a piece. */
static int64_t end_of(const hvd_task *task, int64_t start) {
    return hvd_shorter(start + HVD_BLOCK, task->start + task->length);
}

static void encode_piece(void *context, int64_t number) {
    const struct job *job = context;
    const int64_t block = job->block;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    float *scales = (float *)(void *)(job->payload + s->scales);
    const struct codes codes = codes_of(job, s, job->payload);
    float room[HVD_BLOCK], z[LONGEST], padded[LONGEST], of_elements[LONGEST];
    uint32_t words[LONGEST / 32], largest = 0;
    for (int64_t start = task->start, end; start < task->start + task->length; start = end) {
        end = end_of(task, start);
        const float *x = hvd_x_once(job->bucket, s, start, end - start, room, &largest);
        for (int64_t done = 0; done < end - start; done += block) {
            const int64_t length = hvd_shorter(block, end - start - done);
            const float *given = x + done;
            if (s->squares) {
                make_scales(s->squares + start + done, length, of_elements);
                divide(given, length, of_elements, padded);
            } else if (length < block) memcpy(padded, given, (size_t)length * sizeof *padded);
            if (s->squares || length < block) {
                memset(padded + length, 0, (size_t)(block - length) * sizeof *padded);
                given = padded;
            }
            draw_words(start + done, block, s->key, words);
            const char *ahead = hvd_ahead(s, start + done);
            const double squares = flip_and_rotate(given, block, words, z, ahead, 32 * hvd_width_ahead(s));
            const float scale = encode(job, z, codes, start + done, squares);
            scales[(start + done) / block] = scale;
            if (!job->bucket->keeps) continue;
            values(job, z, codes, start + done, scale, 0);
            rotate_and_flip(z, block, words);
            if (s->squares) multiply(z, length, of_elements);
            for (int64_t i = 0; i < length; i++) s->x[start + done + i] = hvd_left(s->x[start + done + i], z[i]);
        }
    }
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(eden_encode)(hvd_bucket *bucket, const float *levels, int64_t block, uint8_t *payload) {
    struct job job = {.bucket = bucket, .levels = levels, .payload = payload, .block = block};
    hvd_parallel(bucket->threads, bucket->task_count, encode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    const int64_t block = job->block;
    const float share = (float)(1.0 / (double)job->ranks);
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    float sum[HVD_BLOCK], of_elements[LONGEST];
    uint32_t words[LONGEST / 32], largest = 0;
    for (int64_t start = task->start, end; start < task->start + task->length; start = end) {
        end = end_of(task, start);
        const int64_t length = (end - start + block - 1) / block * block;
        for (int64_t rank = 0; rank < job->ranks; rank++) {
            uint8_t *payload = (uint8_t *)job->payloads + rank * job->row;
            const float *scales = (const float *)(const void *)(payload + s->scales) + start / block;
            const struct codes codes = codes_of(job, s, payload);
            for (int64_t done = 0; done < length; done += block)
                values(job, sum + done, codes, start + done, scales[done / block], rank > 0);
        }
        if (job->ranks > 1)
            for (int64_t i = 0; i < length; i++) sum[i] *= share;
        for (int64_t done = 0; done < length; done += block) {
            draw_words(start + done, block, s->key, words);
            rotate_and_flip(sum + done, block, words);
            if (!s->squares) continue;
            const int64_t from = start + done, count = hvd_shorter(block, end - from);
            make_scales(s->squares + from, count, of_elements);
            multiply(sum + done, count, of_elements);
            if (s->next_squares) add_squares(sum + done, count, s->squares + from, s->next_squares + from);
        }
        largest = hvd_largest_bits(sum, end - start, largest);
        largest = hvd_put(job->bucket, s, start, end - start, sum, job->large, largest);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(eden_decode)(
    hvd_bucket *bucket, const float *levels, int64_t block, const uint8_t *payloads, int64_t ranks, int64_t row
) {
    struct job job = {.bucket = bucket, .levels = levels, .block = block};
    job.payloads = payloads, job.ranks = ranks, job.row = row, job.large = hvd_is_large(bucket);
    hvd_parallel(bucket->threads, bucket->task_count, decode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

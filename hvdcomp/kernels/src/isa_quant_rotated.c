/* EDEN: blocks of elements, rotated at random, as one of few levels each (hvdcomp/compressors/quantization_rotated.py).
 *
 * A tensor's codes of `count` bits begin at `codes` of a payload, as many as whole blocks have elements, and a float
 * scale for each block at `scales`. The lowest bit of a code is a sign, those above it count the levels. */
#include <math.h>

#include "lanes.h"
#include "make.h"
#include "packing.h"
#include "put.h"
#include "quant.h"

typedef hvd_bits_vector places;
typedef uint32_t words __attribute__((vector_size(4 * HVD_WIDTH)));

struct job {
    const hvd_bucket *bucket;
    uint8_t *payload;
    const uint8_t *payloads;
    int64_t ranks, row; /* bytes of a rank's payload */
    int64_t block;      /* elements, a power of two */
    const float *levels;
    int32_t large;      /* whether results are written past the caches */
};

#define LEVELS 8 /* places for the levels of a number of bits */

/* The levels of a number of bits, and the borders between them. */
static inline const float *levels_of(const struct job *job, int64_t bits) { return job->levels + LEVELS * bits; }

static inline const float *borders_of(const struct job *job, int64_t bits) { return job->levels + LEVELS * (5 + bits); }

/* The signs of elements from number `first` on of 32 that share a random word. */
HVD_INLINE places signs_of(uint32_t word, uint32_t first) {
    words place;
    for (uint32_t i = 0; i < HVD_WIDTH; i++) place[i] = first + i;
    return (places)((word >> place) << 31);
}

/* The random word of 32 elements of a tensor from `start` on. */
static inline uint32_t word_of(int64_t start, uint64_t key) { return hvd_word(hvd_weyl(start / 32, key), key); }

/* Times the signs of a tensor's elements from `start` on, a multiple of 32. */
static void flip(float *x, int64_t start, int64_t length, uint64_t key) {
    for (int64_t i = 0; i < length; i += 32) {
        const uint32_t word = word_of(start + i, key);
        for (uint32_t j = 0; j < 32; j += HVD_WIDTH)
            hvd_store(x + i + j, (hvd_vector)((places)hvd_load(x + i + j) ^ signs_of(word, j)));
    }
}

/* The elements of a vector at places that are known when this is compiled, or of a table. */
HVD_INLINE hvd_vector taken(hvd_vector v, places from) {
#ifdef __clang__
    hvd_vector result;
    for (int i = 0; i < HVD_WIDTH; i++) result[i] = v[from[i]];
    return result;
#else
    return __builtin_shuffle(v, from);
#endif
}

/* Sums and differences of elements `apart` from each other, all in one vector. */
HVD_INLINE hvd_vector butterfly_within(hvd_vector v, int apart) {
    places other, sign;
    for (int i = 0; i < HVD_WIDTH; i++) other[i] = i ^ apart, sign[i] = i & apart ? INT32_MIN : 0;
    return taken(v, other) + (hvd_vector)((places)v ^ sign);
}

/* One to three stages of butterflies at once: of elements `apart`, 2 `apart` and 4 `apart` from each other. */
HVD_INLINE void butterflies(float *x, int64_t length, int64_t apart, int stages) {
    const int count = 1 << stages;
    for (int64_t start = 0; start < length; start += count * apart)
        for (int64_t i = start; i < start + apart; i += HVD_WIDTH) {
            hvd_vector v[8];
            for (int k = 0; k < count; k++) v[k] = hvd_load(x + i + k * apart);
            for (int half = 1; half < count; half *= 2)
                for (int k = 0; k < count; k++)
                    if (!(k & half)) {
                        const hvd_vector a = v[k], b = v[k + half];
                        v[k] = a + b, v[k + half] = a - b;
                    }
            for (int k = 0; k < count; k++) hvd_store(x + i + k * apart, v[k]);
        }
}

/* All butterflies within a vector: those of the nearest elements. */
HVD_INLINE hvd_vector butterflies_within(hvd_vector v) {
    v = butterfly_within(v, 1);
    v = butterfly_within(v, 2);
    if (HVD_WIDTH > 4) v = butterfly_within(v, 4);
    if (HVD_WIDTH > 8) v = butterfly_within(v, 8);
    return v;
}

/* The Walsh-Hadamard transform of `length` elements, a power of two of at least 512, after that within vectors. In the
 * order of `hadamard` in hvdcomp/arrays/numpy_arrays.py. */
static void rotate_vectors(float *x, int64_t length) {
    int64_t apart = HVD_WIDTH;
    for (; 8 * apart <= length; apart *= 8) butterflies(x, length, apart, 3);
    if (4 * apart == length) butterflies(x, length, apart, 2);
    if (2 * apart == length) butterflies(x, length, apart, 1);
}

static void rotate(float *x, int64_t length) {
    for (int64_t i = 0; i < length; i += HVD_WIDTH) hvd_store(x + i, butterflies_within(hvd_load(x + i)));
    rotate_vectors(x, length);
}

/* Sums in double precision of a vector's lanes. */
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

/* The sum of lanes, as `row_dots` in hvdcomp/arrays/numpy_arrays.py has it. */
static inline double sum_of_lanes(const sums_vector sums[HVD_PARTS]) {
    double lanes[HVD_LANES];
    memcpy(lanes, sums, sizeof lanes);
    for (int half = HVD_LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* `flip` and then `rotate` of a block x, to z; returns the sum of squares of x. */
static double flip_and_rotate(const float *x, int64_t start, int64_t length, uint64_t key, float *restrict z) {
    sums_vector sums[HVD_PARTS];
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < length; i += 32) {
        const uint32_t word = word_of(start + i, key);
        for (uint32_t j = 0; j < 32; j += HVD_WIDTH) {
            const hvd_vector value = hvd_load(x + i + j);
            add_products(sums + j / HVD_WIDTH % HVD_PARTS, value, value);
            hvd_store(z + i + j, butterflies_within((hvd_vector)((places)value ^ signs_of(word, j))));
        }
    }
    rotate_vectors(z, length);
    return sum_of_lanes(sums);
}

HVD_INLINE places load_codes(const uint8_t *codes) {
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

HVD_INLINE void store_codes(uint8_t *codes, places vector) {
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

HVD_INLINE hvd_vector choose(places condition, hvd_vector yes, hvd_vector no) {
    return (hvd_vector)(((places)yes & condition) | ((places)no & ~condition));
}

/* Codes of a block with `count` levels, whose rms is given; returns the product of its magnitudes and their levels. */
HVD_INLINE double encode_levels(
    const float *restrict z, int64_t length, const float *levels, const float *borders, int count, float rms,
    uint8_t *restrict codes
) {
    sums_vector sums[HVD_PARTS];
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < length; i += HVD_LANES)
        for (int part = 0; part < HVD_PARTS; part++) {
            const hvd_vector value = hvd_load(z + i + part * HVD_WIDTH);
            const hvd_vector magnitude = (hvd_vector)((places)value & INT32_MAX);
            hvd_vector level = hvd_all(levels[0]);
            places code = (places)(value < 0) & 1;
            for (int above = 1; above < count; above++) {
                const places larger = magnitude > hvd_all(rms * borders[above - 1]);
                level = choose(larger, hvd_all(levels[above]), level);
                code -= larger + larger;
            }
            store_codes(codes + i + part * HVD_WIDTH, code);
            add_products(sums + part, magnitude, level);
        }
    return sum_of_lanes(sums);
}

/* Codes of a rotated block of which the sum of squares is given as it was before; returns its scale. */
static float encode(const struct job *job, const float *z, int bits, double squares, uint8_t *codes) {
    const float rms = (float)sqrt(squares), *levels = levels_of(job, bits), *borders = borders_of(job, bits);
    double product;
    switch (bits) {
    case 1: product = encode_levels(z, job->block, levels, borders, 1, rms, codes); break;
    case 2: product = encode_levels(z, job->block, levels, borders, 2, rms, codes); break;
    case 3: product = encode_levels(z, job->block, levels, borders, 4, rms, codes); break;
    default: product = encode_levels(z, job->block, levels, borders, 8, rms, codes);
    }
    if (rms <= HVD_SMALLEST_SCALE) return 0;
    return (float)(squares * (product > 0 ? 1 / product : 0) * (1 + 0 * product)); /* NaN if the product is infinite */
}

/* Adds the values of a block's codes with `count` levels, or sets them. */
HVD_INLINE void put_values(
    float *restrict sum, const uint8_t *restrict codes, int64_t length, const float *levels, int count, float scale,
    int add
) {
    hvd_vector table = {0};
    if (HVD_WIDTH >= LEVELS)
        for (int level = 0; level < LEVELS; level++) table[level] = levels[level];
    for (int64_t i = 0; i < length; i += HVD_WIDTH) {
        const places code = load_codes(codes + i);
        hvd_vector value = hvd_all(levels[0]);
        if (HVD_WIDTH >= LEVELS && count > 2) value = taken(table, code >> 1);
        else
            for (int above = 1; above < count; above++)
                value = choose(code >= 2 * above, hvd_all(levels[above]), value);
        value = (hvd_vector)((places)value ^ code << 31) * scale;
        if (add) value += hvd_load(sum + i);
        hvd_store(sum + i, value);
    }
}

static void values(const struct job *job, float *sum, const uint8_t *codes, int bits, float scale, int add) {
    const float *levels = levels_of(job, bits);
    const int64_t length = job->block;
    if (bits == 1 && add) put_values(sum, codes, length, levels, 1, scale, 1);
    else if (bits == 1) put_values(sum, codes, length, levels, 1, scale, 0);
    else if (bits == 2 && add) put_values(sum, codes, length, levels, 2, scale, 1);
    else if (bits == 2) put_values(sum, codes, length, levels, 2, scale, 0);
    else if (bits == 3 && add) put_values(sum, codes, length, levels, 4, scale, 1);
    else if (bits == 3) put_values(sum, codes, length, levels, 4, scale, 0);
    else if (add) put_values(sum, codes, length, levels, 8, scale, 1);
    else put_values(sum, codes, length, levels, 8, scale, 0);
}

/* Packs the codes of a part of a tensor, or unpacks them if `unpacking`: `length` codes, of whole blocks. */
static void pack(
    const struct job *job, const hvd_segment *s, uint8_t *codes, uint8_t *payload, int64_t start, int64_t length,
    int unpacking
) {
    const int64_t size = (s->size + job->block - 1) / job->block * job->block;
    for (int64_t group = 0; group < length; group += HVD_GROUP)
        hvd_pack(codes + group, payload + s->codes, size, start + group, HVD_GROUP, (int)s->count, unpacking);
}

/* The end of a part of a tensor that begins at `start` and belongs to a piece. */
static int64_t end_of(const hvd_task *task, int64_t start) {
    return hvd_shorter(start + HVD_BLOCK, task->start + task->length);
}

static void encode_piece(void *context, int64_t number) {
    const struct job *job = context;
    const int64_t block = job->block;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    float *scales = (float *)(void *)(job->payload + s->scales);
    uint8_t codes[HVD_BLOCK];
    float room[HVD_BLOCK], z[HVD_BLOCK], padded[HVD_BLOCK];
    uint32_t largest = 0;
    for (int64_t start = task->start, end; start < task->start + task->length; start = end) {
        end = end_of(task, start);
        const float *x = hvd_x_once(job->bucket, s, start, end - start, room, &largest);
        int64_t done = 0; /* at last as many as whole blocks have */
        for (; done < end - start; done += block) {
            const int64_t length = hvd_shorter(block, end - start - done);
            const float *given = x + done;
            if (length < block) {
                memcpy(padded, given, (size_t)length * sizeof *padded);
                memset(padded + length, 0, (size_t)(block - length) * sizeof *padded);
                given = padded;
            }
            for (int64_t ahead = 0; ahead < length; ahead += HVD_GROUP) hvd_ask_ahead(s, start + done + ahead);
            const double squares = flip_and_rotate(given, start + done, block, s->key, z);
            const float scale = encode(job, z, (int)s->count, squares, codes + done);
            scales[(start + done) / block] = scale;
            if (!job->bucket->keeps) continue;
            values(job, z, codes + done, (int)s->count, scale, 0);
            rotate(z, block);
            flip(z, start + done, block, s->key);
            for (int64_t i = 0; i < length; i++) s->x[start + done + i] = hvd_left(s->x[start + done + i], z[i]);
        }
        pack(job, s, codes, job->payload, start, done, 0);
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
    uint8_t codes[HVD_BLOCK];
    float sum[HVD_BLOCK];
    uint32_t largest = 0;
    for (int64_t start = task->start, end; start < task->start + task->length; start = end) {
        end = end_of(task, start);
        const int64_t length = (end - start + block - 1) / block * block;
        for (int64_t rank = 0; rank < job->ranks; rank++) {
            uint8_t *payload = (uint8_t *)job->payloads + rank * job->row;
            const float *scales = (const float *)(const void *)(payload + s->scales) + start / block;
            pack(job, s, codes, payload, start, length, 1);
            for (int64_t done = 0; done < length; done += block)
                values(job, sum + done, codes + done, (int)s->count, scales[done / block], rank > 0);
        }
        if (job->ranks > 1)
            for (int64_t i = 0; i < length; i++) sum[i] *= share;
        for (int64_t done = 0; done < length; done += block) rotate(sum + done, block);
        flip(sum, start, length, s->key);
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

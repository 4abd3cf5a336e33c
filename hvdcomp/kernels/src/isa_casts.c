/* Casts to half precision and bfloat16. The 16-bit numbers of each tensor begin at number `values` of the payload. */
#include "half.h"
#include "make.h"
#include "put.h"
#include "quant.h"

struct job {
    const hvd_bucket *bucket;
    uint16_t *wire;
    const uint8_t *payloads;
    int64_t ranks, row; /* row: bytes of a rank's payload */
    int large, nearest;
};

/* Rounds the magnitude at random. The 19 random bits that are added to it may carry; their unit is 2**-19 of the
 * distance between neighboring numbers. The result is infinite only if rounding to nearest also gives infinity. */
static void to_halves_at_random(const float *restrict x, int64_t start, int64_t length, uint64_t key, uint16_t *out) {
    /* From half a step above the largest number, numbers round to infinity. */
    const uint32_t most = hvd_bits(HVD_LARGEST_HALF), infinite = most + (1u << 12);
    uint32_t weyl = hvd_weyl(start, key);
    for (int64_t i = 0; i < length; i++, weyl += HVD_WEYL) {
        const uint32_t magnitude = hvd_bits(x[i]) & 0x7fffffffu, sign = hvd_bits(x[i]) >> 16 & 0x8000u;
        const uint32_t held = magnitude < most ? magnitude : most;
        const uint32_t power = held & HVD_INFINITE, least = 0x38800000u; /* 2**-14 */
        const uint32_t above = (power > least ? power : least) - least;
        const float distances = hvd_of_bits(held) * hvd_of_bits((283u << 23) - least - above);
        const uint32_t code = ((uint32_t)(int32_t)distances + (hvd_word(weyl, key) >> 13)) >> 19;
        const uint32_t not_finite = magnitude > HVD_INFINITE ? 0x7e00u : 0x7c00u;
        out[i] = (uint16_t)(sign | (magnitude < infinite ? code + (above >> 13) : not_finite));
    }
}

/* Rounds at random with 16 random bits, because bfloat16 drops 16 bits. */
static void to_bfloat16s_at_random(
    const float *restrict x, int64_t start, int64_t length, uint64_t key, uint16_t *out
) {
    /* From half a step above the largest number, numbers round to infinity. */
    const uint32_t most = hvd_bits(HVD_LARGEST_BFLOAT16), infinite = most + (1u << 15);
    uint32_t weyl = hvd_weyl(start, key);
    for (int64_t i = 0; i < length; i++, weyl += HVD_WEYL) {
        const uint32_t magnitude = hvd_bits(x[i]) & 0x7fffffffu, sign = hvd_bits(x[i]) >> 16 & 0x8000u;
        const uint32_t held = magnitude < most ? magnitude : most;
        const uint32_t code = (held + (hvd_word(weyl, key) >> 16)) >> 16;
        const uint32_t not_finite = magnitude > HVD_INFINITE ? magnitude >> 16 | 0x40u : 0x7f80u;
        out[i] = (uint16_t)(sign | (magnitude < infinite ? code : not_finite));
    }
}

static inline __attribute__((always_inline)) void encode_piece(
    const struct job *job, int64_t number, void (*to)(const float *, int64_t, uint16_t *),
    void (*at_random)(const float *, int64_t, int64_t, uint64_t, uint16_t *),
    void (*from)(const uint16_t *, int64_t, float *), uint16_t infinite
) {
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t end = task->start + task->length;
    float sent[HVD_GROUP], room[HVD_GROUP];
    uint32_t largest = 0;
    uint16_t highest = 0;
    for (int64_t start = task->start; start < end; start += HVD_GROUP) {
        const int64_t length = hvd_shorter(HVD_GROUP, end - start);
        uint16_t *out = job->wire + s->values + start;
        const float *x = hvd_x_once(job->bucket, s, start, length, room, &largest);
        if (job->nearest > 1)
            for (int64_t i = 0; i < length; i++) out[i] = hvd_nearest_finite(x[i], HVD_HALF);
        else if (job->nearest)
            to(x, length, out);
        else
            at_random(x, start, length, s->key, out);
        for (int64_t i = 0; i < length; i++) {
            const uint16_t magnitude = out[i] & 0x7fffu;
            highest = magnitude > highest ? magnitude : highest;
        }
        if (!job->bucket->keeps) continue;
        from(out, length, sent);
        for (int64_t i = 0; i < length; i++) s->x[start + i] = hvd_left(s->x[start + i], sent[i]);
    }
    task->counts[0] = largest >= HVD_INFINITE || highest >= infinite;
}

static inline __attribute__((always_inline)) void decode_piece(
    const struct job *job, int64_t number, void (*from)(const uint16_t *, int64_t, float *)
) {
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t end = task->start + task->length;
    float sum[HVD_GROUP], other[HVD_GROUP];
    uint32_t largest = 0;
    for (int64_t start = task->start; start < end; start += HVD_GROUP) {
        const int64_t length = hvd_shorter(HVD_GROUP, end - start);
        for (int64_t rank = 0; rank < job->ranks; rank++) {
            const uint8_t *payload = job->payloads + rank * job->row;
            from((const uint16_t *)(const void *)payload + s->values + start, length, rank ? other : sum);
            for (int64_t i = 0; rank && i < length; i++) sum[i] += other[i];
        }
        largest = hvd_mean(sum, length, job->ranks, largest);
        largest = hvd_put(job->bucket, s, start, length, sum, job->large, largest);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

static void encode_halves(void *job, int64_t task) {
    encode_piece(job, task, hvd_to_halves, to_halves_at_random, hvd_from_halves, 0x7c00);
}

static void decode_halves(void *job, int64_t task) { decode_piece(job, task, hvd_from_halves); }

static void encode_bfloat16s(void *job, int64_t task) {
    encode_piece(job, task, hvd_to_bfloat16s, to_bfloat16s_at_random, hvd_from_bfloat16s, 0x7f80);
}

static void decode_bfloat16s(void *job, int64_t task) { decode_piece(job, task, hvd_from_bfloat16s); }

int32_t HVD_NAME(half_encode)(hvd_bucket *bucket, uint16_t *wire, int32_t nearest) {
    struct job job = {.bucket = bucket, .wire = wire, .nearest = nearest};
    hvd_parallel(bucket->threads, bucket->task_count, encode_halves, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

int32_t HVD_NAME(half_decode)(hvd_bucket *bucket, const uint8_t *payloads, int64_t ranks, int64_t row) {
    struct job job = {bucket, NULL, payloads, ranks, row, hvd_is_large(bucket), 1};
    hvd_parallel(bucket->threads, bucket->task_count, decode_halves, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

int32_t HVD_NAME(bfloat16_encode)(hvd_bucket *bucket, uint16_t *wire, int32_t nearest) {
    struct job job = {.bucket = bucket, .wire = wire, .nearest = nearest};
    hvd_parallel(bucket->threads, bucket->task_count, encode_bfloat16s, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

int32_t HVD_NAME(bfloat16_decode)(hvd_bucket *bucket, const uint8_t *payloads, int64_t ranks, int64_t row) {
    struct job job = {bucket, NULL, payloads, ranks, row, hvd_is_large(bucket), 1};
    hvd_parallel(bucket->threads, bucket->task_count, decode_bfloat16s, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

#define SLICE 65536 /* number of elements of a slice, which is one task */

struct cast {
    const float *x;
    float *widened;
    uint16_t *halves;
    int64_t size;
};

static void narrow_slice(void *context, int64_t task) {
    const struct cast *cast = context;
    const int64_t start = task * SLICE;
    hvd_to_halves(cast->x + start, hvd_shorter(SLICE, cast->size - start), cast->halves + start);
}

static void widen_slice(void *context, int64_t task) {
    const struct cast *cast = context;
    const int64_t end = hvd_shorter(cast->size, (task + 1) * SLICE);
    const int large = cast->size * (int64_t)sizeof(float) >= HVD_LARGE;
    float widened[HVD_GROUP];
    for (int64_t start = task * SLICE; start < end; start += HVD_GROUP) {
        const int64_t length = hvd_shorter(HVD_GROUP, end - start);
        hvd_from_halves(cast->halves + start, length, widened);
        hvd_copy(cast->widened + start, widened, length, large);
    }
    hvd_fence();
}

void HVD_NAME(half_narrow)(const float *x, int64_t size, uint16_t *halves, int32_t threads) {
    struct cast cast = {x, NULL, halves, size};
    hvd_parallel(threads, (size + SLICE - 1) / SLICE, narrow_slice, &cast);
}

void HVD_NAME(half_widen)(const uint16_t *halves, int64_t size, float *x, int32_t threads) {
    struct cast cast = {NULL, x, (uint16_t *)halves, size};
    hvd_parallel(threads, (size + SLICE - 1) / SLICE, widen_slice, &cast);
}

/* Natural compression: elements are rounded at random to powers of two, which are sent as sign and exponent.
 *
 * A tensor's exponents have one byte each and begin at `exponents` of a payload. Its packed sign bits begin at
 * `signs`. */
#include "make.h"
#include "packing.h"
#include "put.h"
#include "quant.h"

struct job {
    const hvd_bucket *bucket;
    uint8_t *payload;
    const uint8_t *payloads;
    int64_t ranks, row; /* row: bytes of a rank's payload */
    int large;
};

static float power(uint8_t exponent, uint8_t sign) {
    const uint32_t bits = (uint32_t)sign << 31 | (uint32_t)exponent << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds the exponent at random: random bits are added to the bits below it, and only the carry is kept. */
static void round_to_powers(
    const float *restrict x, int64_t start, int64_t length, uint64_t key, uint8_t *restrict exponents,
    uint8_t *restrict signs
) {
    uint32_t weyl = hvd_weyl(start, key);
    for (int64_t i = 0; i < length; i++, weyl += HVD_WEYL) {
        const uint32_t magnitude = hvd_bits(x[i]) & 0x7fffffffu;
        const uint32_t rounded = (magnitude + (hvd_word(weyl, key) >> 9)) >> 23;
        exponents[i] = (uint8_t)((rounded < 254 ? rounded : 254) | (magnitude >= HVD_INFINITE));
        signs[i] = hvd_bits(x[i]) > 0x80000000u; /* also right if the processor treats denormal numbers as zero */
    }
}

static void encode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t end = task->start + task->length;
    uint8_t signs[HVD_GROUP + 8];
    float room[HVD_GROUP];
    uint32_t largest = 0;
    for (int64_t start = task->start; start < end; start += HVD_GROUP) {
        const int64_t length = hvd_shorter(HVD_GROUP, end - start);
        hvd_ask_ahead(s, start);
        const float *x = hvd_x_once(job->bucket, s, start, length, room, &largest);
        uint8_t *exponents = job->payload + s->exponents + start;
        round_to_powers(x, start, length, s->key, exponents, signs);
        if (job->bucket->keeps)
            for (int64_t i = 0; i < length; i++)
                s->x[start + i] = hvd_left(s->x[start + i], power(exponents[i], signs[i]));
        memset(signs + length, 0, 8);
        hvd_pack(signs, job->payload + s->signs, s->size, start, length, 1, 0);
    }
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(natural_encode)(hvd_bucket *bucket, uint8_t *payload) {
    struct job job = {.bucket = bucket, .payload = payload};
    hvd_parallel(bucket->threads, bucket->task_count, encode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void add_powers(
    float *restrict sum, const uint8_t *restrict exponents, const uint8_t *restrict signs, int64_t length, int add
) {
    if (add)
        for (int64_t i = 0; i < length; i++) sum[i] += power(exponents[i], signs[i]);
    else
        for (int64_t i = 0; i < length; i++) sum[i] = power(exponents[i], signs[i]);
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t end = task->start + task->length;
    uint8_t signs[HVD_GROUP + 8];
    float sum[HVD_GROUP];
    uint32_t largest = 0;
    for (int64_t start = task->start; start < end; start += HVD_GROUP) {
        const int64_t length = hvd_shorter(HVD_GROUP, end - start);
        for (int64_t rank = 0; rank < job->ranks; rank++) {
            const uint8_t *payload = job->payloads + rank * job->row;
            hvd_pack(signs, (uint8_t *)payload + s->signs, s->size, start, length, 1, 1);
            add_powers(sum, payload + s->exponents + start, signs, length, rank > 0);
        }
        largest = hvd_mean(sum, length, job->ranks, largest);
        largest = hvd_put(job->bucket, s, start, length, sum, job->large, largest);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(natural_decode)(hvd_bucket *bucket, const uint8_t *payloads, int64_t ranks, int64_t row) {
    struct job job = {bucket, NULL, payloads, ranks, row, hvd_is_large(bucket)};
    hvd_parallel(bucket->threads, bucket->task_count, decode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

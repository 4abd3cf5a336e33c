/* Packs codes as hvdcomp/compressors/packing.py does: in planes, and each plane in groups. */
#ifndef HVDCOMP_PACKING_H
#define HVDCOMP_PACKING_H

#include <stdint.h>
#include <string.h>

#define HVD_GROUP 512 /* number of codes */

/* Packs a plane into bytes of 8 / width codes each. Code j + k * bytes is stored in byte j, k fields above its lowest
 * bits. `codes` must be padded with zeros to whole bytes. The function works on eight bytes at a time, with operations
 * that do not cross bytes. */
static inline __attribute__((always_inline)) void hvd_pack_plane(
    const uint8_t *restrict codes, int64_t bytes, int shift, int width, uint8_t *restrict out
) {
    const uint64_t mask = 0x0101010101010101u * ((1u << width) - 1);
    int64_t j = 0;
    for (; j + 8 <= bytes; j += 8) {
        uint64_t word = 0;
        for (int k = 0; k < 8 / width; k++) {
            uint64_t field;
            memcpy(&field, codes + j + k * bytes, sizeof field);
            word |= (field >> shift & mask) << (k * width);
        }
        memcpy(out + j, &word, sizeof word);
    }
    for (; j < bytes; j++) {
        out[j] = 0;
        for (int k = 0; k < 8 / width; k++)
            out[j] = (uint8_t)(out[j] | (codes[j + k * bytes] >> shift & (uint8_t)mask) << (k * width));
    }
}

static inline __attribute__((always_inline)) void hvd_unpack_plane(
    const uint8_t *restrict in, int64_t bytes, int shift, int width, uint8_t *restrict codes
) {
    const uint64_t mask = 0x0101010101010101u * ((1u << width) - 1);
    for (int k = 0; k < 8 / width; k++) {
        uint8_t *restrict out = codes + k * bytes;
        int64_t j = 0;
        for (; j + 8 <= bytes; j += 8) {
            uint64_t word, before = 0;
            memcpy(&word, in + j, sizeof word);
            if (shift) memcpy(&before, out + j, sizeof before);
            word = before | (word >> (k * width) & mask) << shift;
            memcpy(out + j, &word, sizeof word);
        }
        for (; j < bytes; j++)
            out[j] = (uint8_t)((shift ? out[j] : 0) | (in[j] >> (k * width) & (uint8_t)mask) << shift);
    }
}

/* Packs a group, or unpacks it if `unpacking`.
 *
 * packed: the packed codes of the whole tensor.
 * size: the tensor's number of codes.
 * start, length: start and length of the group, which has at most HVD_GROUP codes.
 * codes: the codes of the group, and room for 7 more, which must be zero when the group is packed.
 */
static inline void hvd_pack(
    uint8_t *codes, uint8_t *packed, int64_t size, int64_t start, int64_t length, int bits, int unpacking
) {
    int shift = 0;
    for (int width = 8; width; width /= 2) {
        if (!(bits & width)) continue;
        uint8_t *bytes = packed + start * width / 8;
        const int64_t count = (length * width + 7) / 8;
        if (width == 8) memcpy(unpacking ? codes : bytes, unpacking ? bytes : codes, (size_t)length);
        else if (unpacking)
            switch (width) {
            case 4: hvd_unpack_plane(bytes, count, shift, 4, codes); break;
            case 2: hvd_unpack_plane(bytes, count, shift, 2, codes); break;
            default: hvd_unpack_plane(bytes, count, shift, 1, codes);
            }
        else
            switch (width) {
            case 4: hvd_pack_plane(codes, count, shift, 4, bytes); break;
            case 2: hvd_pack_plane(codes, count, shift, 2, bytes); break;
            default: hvd_pack_plane(codes, count, shift, 1, bytes);
            }
        packed += (size * width + 7) / 8;
        shift += width;
    }
}

#endif

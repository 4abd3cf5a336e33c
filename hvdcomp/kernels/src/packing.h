/* Codes packed as hvdcomp/compressors/packing.py says: in planes, and there in groups. */
#ifndef HVDCOMP_PACKING_H
#define HVDCOMP_PACKING_H

#include <stdint.h>
#include <string.h>

#define HVD_GROUP 512 /* codes */

/* A plane's bytes of `together` codes each: code j + k * bytes goes to byte j, k fields from its lowest bits. `codes` has
 * zeros behind its end, up to whole bytes. */
static inline __attribute__((always_inline)) void hvd_pack_plane(
    const uint8_t *restrict codes, int64_t bytes, int shift, int width, uint8_t *restrict out
) {
    const uint8_t mask = (uint8_t)((1 << width) - 1);
    for (int64_t j = 0; j < bytes; j++) {
        uint8_t byte = 0;
        for (int k = 0; k * width < 8; k++)
            byte = (uint8_t)(byte | (uint8_t)((codes[j + k * bytes] >> shift & mask) << (k * width)));
        out[j] = byte;
    }
}

static inline __attribute__((always_inline)) void hvd_unpack_plane(
    const uint8_t *restrict in, int64_t bytes, int shift, int width, uint8_t *restrict codes
) {
    const uint8_t mask = (uint8_t)((1 << width) - 1);
    for (int k = 0; k * width < 8; k++)
        for (int64_t j = 0; j < bytes; j++) {
            const uint8_t code = (uint8_t)((in[j] >> (k * width) & mask) << shift);
            codes[j + k * bytes] = shift ? (uint8_t)(codes[j + k * bytes] | code) : code;
        }
}

/* Packs a group, or unpacks it if `unpacking`.
 *
 * packed: all codes of the tensor.
 * size: of the tensor.
 * start, length: of the group; at most HVD_GROUP codes.
 * codes: the group's, and room for 7 more, which are zero if they are packed.
 */
static inline void hvd_pack(uint8_t *codes, uint8_t *packed, int64_t size, int64_t start, int64_t length, int bits, int unpacking) {
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

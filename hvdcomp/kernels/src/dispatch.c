/* Chooses between the instruction sets that the kernels were compiled for, and exports the kernels. */
#include <stddef.h>
#include <string.h>

#include "hvdcomp.h"
#include "table.h"

extern const struct hvd_kernels hvd_kernels_plain;
#ifdef HVD_X86
extern const struct hvd_kernels hvd_kernels_avx2, hvd_kernels_avx512;
#endif

/* From the fastest to the most general. */
static const struct hvd_kernels *const TABLES[] = {
#ifdef HVD_X86
    &hvd_kernels_avx512,
    &hvd_kernels_avx2,
#endif
    &hvd_kernels_plain,
};

static const struct hvd_kernels *chosen = &hvd_kernels_plain;

/* Whether this CPU and the operating system support the compiler options of build.py. Every CPU with the instruction
 * sets named here also has F16C, LZCNT and POPCNT, which older compilers cannot test for. */
static int supported(const struct hvd_kernels *table) {
#ifdef HVD_X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2");
    if (table == &hvd_kernels_avx2) return avx2;
    if (table == &hvd_kernels_avx512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
#endif
    return table == &hvd_kernels_plain;
}

__attribute__((constructor)) static void choose_the_best(void) {
    for (size_t i = 0; i < sizeof TABLES / sizeof *TABLES; i++)
        if (supported(TABLES[i])) {
            chosen = TABLES[i];
            return;
        }
}

int32_t hvd_abi_version(void) { return HVD_ABI_VERSION; }

const char *hvd_sources(void) { return HVD_SOURCES; }

const char *hvd_instruction_set(void) { return chosen->instruction_set; }

int32_t hvd_use_instruction_set(const char *name) {
    for (size_t i = 0; i < sizeof TABLES / sizeof *TABLES; i++)
        if (strcmp(name, TABLES[i]->instruction_set) == 0) {
            if (!supported(TABLES[i])) return 2;
            chosen = TABLES[i];
            return 0;
        }
    return 1;
}

#define HVD_KERNEL(type, name, parameters, arguments) \
    type hvd_##name parameters { return chosen->name arguments; }
#include "kernels.def"
#undef HVD_KERNEL

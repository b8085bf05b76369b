// The register tiles of the matrix product: R rows by one panel of 16 outputs, over the whole of k.
// acc[R][16] receives the sums. The files named micro_* are the only ones with a version per instruction set.
#pragma once
#include "simd.h"

#if defined(__AVX512VNNI__) && defined(PT_512)
#include "micro_avx512.h"
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include "micro_vnni256.h"
#elif defined(__AVX2__)
#include "micro_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "micro_neon.h"
#else
#include "micro_portable.h"
#endif

#if !defined(__AVX512VNNI__) || !defined(PT_512)
#include "micro_terms.h"
#endif

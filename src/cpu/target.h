// Regions of code for one instruction set: SPARSEMLA_TARGET_BEGIN("avx2,fma") ...
// SPARSEMLA_TARGET_END. All includes come before a region, and everything in it lives in an
// anonymous namespace: a weak symbol (an inline function, a std template) made inside could be
// linked into baseline callers.
#pragma once

#define SPARSEMLA_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define SPARSEMLA_TARGET_BEGIN(features) \
  SPARSEMLA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define SPARSEMLA_TARGET_END SPARSEMLA_PRAGMA(clang attribute pop)
#else
#define SPARSEMLA_TARGET_BEGIN(features) \
  SPARSEMLA_PRAGMA(GCC push_options)     \
  SPARSEMLA_PRAGMA(GCC target(features))
#define SPARSEMLA_TARGET_END SPARSEMLA_PRAGMA(GCC pop_options)
#endif

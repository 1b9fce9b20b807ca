#include "cpu/kernels.h"

#if defined(__x86_64__) && defined(__linux__) && !defined(SPARSEMLA_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/require.h"

namespace sparsemla::cpu {
namespace {

constexpr AttentionKernel kKernels[] = {
#define SPARSEMLA_ATTENTION_KERNEL(name, arch, family, run_group) \
  {#name, arch, name, run_group, family::ScratchBytes, family::UnsupportedReason},
#include "cpu/kernels.inc"
#undef SPARSEMLA_ATTENTION_KERNEL
};

std::string KernelNames() {
  std::string names;
  for (const AttentionKernel& kernel : kKernels) {
    if (!names.empty()) names += ", ";
    names += kernel.name;
  }
  return names;
}

#if defined(__x86_64__)
enum class Amx { kAbsent, kRefused, kUsable };

// Whether the tile unit is there and Linux lets this process use it: a process has to ask once, and
// the answer is no where a sandbox filters the call.
Amx FindAmxBf16() {
  if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512bf16")) {
    return Amx::kAbsent;
  }
#if defined(SPARSEMLA_EMULATE_AMX)
  return Amx::kUsable;
#elif defined(__linux__)
  constexpr unsigned kAmxBits = 1u << 22 | 1u << 24;  // CPUID.7.0:EDX, AMX-BF16 and AMX-TILE
  constexpr long kRequestPermission = 0x1023;         // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;                      // XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return Amx::kAbsent;
  if ((edx & kAmxBits) != kAmxBits) return Amx::kAbsent;
  const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted ? Amx::kUsable : Amx::kRefused;
#else
  return Amx::kAbsent;
#endif
}
#endif

}  // namespace

ArchFlags DetectArch() {
  ArchFlags arch = kAnyCpu;
#if defined(__x86_64__)
  // The compiler's runtime asks cpuid, and xgetbv for what the operating system saves.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    arch |= kAvx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      arch |= kAvx512;
      if (FindAmxBf16() == Amx::kUsable) arch |= kAmxBf16;
    }
  }
#endif
  return arch;
}

std::string ArchNames(ArchFlags arch) {
  std::string names;
  if (arch & kAvx2) names += "avx2";
  if (arch & kAvx512) names += names.empty() ? "avx512f" : " avx512f";
  if (arch & kAmxBf16) names += names.empty() ? "amx_bf16" : " amx_bf16";
  return names.empty() ? "baseline" : names;
}

std::span<const AttentionKernel> AttentionKernels() {
  return kKernels;
}

std::string UnavailableReason(const AttentionKernel& kernel, ArchFlags arch) {
  const ArchFlags missing = kernel.arch & ~arch;
  if (missing == 0) return {};
  std::string reason = StrCat("needs ", ArchNames(missing), "; this CPU has ", ArchNames(arch));
#if defined(__x86_64__)
  if ((missing & kAmxBf16) != 0 && FindAmxBf16() == Amx::kRefused) {
    reason += ", and AMX tiles that the system does not let this process use";
  }
#endif
  return reason;
}

Result<const AttentionKernel*> FindKernel(std::string_view name, ArchFlags arch) {
  for (const AttentionKernel& kernel : kKernels) {
    if (name != kernel.name) continue;
    const std::string reason = UnavailableReason(kernel, arch);
    if (reason.empty()) return &kernel;
    return Status(StatusCode::kUnsupported, StrCat(name, " ", reason));
  }
  return Status(StatusCode::kInvalidArgument,
                StrCat("no attention kernel is called '", name, "'; there are ", KernelNames()));
}

const AttentionKernel& BestKernel(const Problem& problem, ArchFlags arch) {
  const AttentionKernel* best = kKernels;
  while ((best->arch & ~arch) != 0 || !best->unsupported_reason(problem).empty()) ++best;
  return *best;
}

}  // namespace sparsemla::cpu

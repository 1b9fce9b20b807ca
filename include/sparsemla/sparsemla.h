/* The C ABI: the C++ interface (backend.h, plan.h, attention.h) for callers in C or any language
 * that can call C. Compiles as C99 and as C++.
 *
 * One step of an engine:
 *
 *   sparsemla_backend_create          once
 *   sparsemla_workspace_bytes         once: the caller allocates the scratch memory
 *   sparsemla_plan_create             once: the limits; all memory of the plan
 *   sparsemla_plan_build              every step, from host lengths
 *   sparsemla_run                     every layer: indices -> attention -> merge
 *
 * or, instead of sparsemla_run, the stages one by one.
 *
 * Conventions
 * - Calls return a status. A text for people that names the value and its bound is then in
 *   sparsemla_last_error(), per thread. A null argument is an error that names the argument. On an
 *   error (but one of the caller's parallel_for) no output has been written. Nothing is printed,
 *   nothing aborts, no exception leaves.
 * - Memory of arrays belongs to the caller and must stay valid until the work is done (`stream`:
 *   the device queue that work is put on; null: the default queue, or the calling thread). Inputs
 *   are never written. Strings and arrays returned belong to the handle that they came from.
 * - Every struct that is passed by pointer begins with `struct_size`. Inputs start from their
 *   SPARSEMLA_..._INIT macro, which sets it and every default; in outputs the caller sets it to the
 *   struct's sizeof. A struct of an older version is shorter: what it lacks takes its default, and
 *   of an output only what fits is written. A struct of a newer version is accepted as long as the
 *   fields that this library does not know are zero: zero in a new field means the old behaviour.
 *   sparsemla_tensor and the other structs without `struct_size` never change.
 * - Version promise: the major version counts changes of existing layouts, values or signatures,
 *   the minor version additions (fields at the end, enum values, functions). A program works with
 *   every library of the same major version and an equal or later minor version.
 *
 * Threads: a back end may be used by several threads at once if their plans, workspaces and outputs
 * differ. A plan may be read by several threads, but not while sparsemla_plan_build runs on it. */
#ifndef SPARSEMLA_SPARSEMLA_H_
#define SPARSEMLA_SPARSEMLA_H_

#include <stddef.h>
#include <stdint.h>

#define SPARSEMLA_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---- versions and errors ------------------------------------------------------------------- */

#define SPARSEMLA_ABI_MAJOR 1
#define SPARSEMLA_ABI_MINOR 1

/* Version of this ABI in the loaded library: major * 1000 + minor. */
SPARSEMLA_API int32_t sparsemla_version(void);

/* Version of the library itself, "0.1.0". */
SPARSEMLA_API const char* sparsemla_library_version(void);

typedef int32_t sparsemla_status;
enum {
  SPARSEMLA_OK = 0,
  SPARSEMLA_INVALID_ARGUMENT = 1,    /* a value is out of its bounds */
  SPARSEMLA_UNSUPPORTED = 2,         /* a valid problem that this back end does not solve */
  SPARSEMLA_FAILED_PRECONDITION = 3, /* calls in a wrong order, or a plan made for other inputs */
  SPARSEMLA_RESOURCE_EXHAUSTED = 4,  /* memory, capacity or workspace too small */
  SPARSEMLA_DEVICE_ERROR = 5,        /* a driver or device reported an error */
  SPARSEMLA_INTERNAL = 6             /* a defect of the library, or of the parallel_for */
};

/* Text of the last error on this thread, "" if there was none; at most 1023 bytes, valid until the
 * thread's next failing call. */
SPARSEMLA_API const char* sparsemla_last_error(void);

/* ---- arrays -------------------------------------------------------------------------------- */

typedef int32_t sparsemla_dtype;
enum {
  SPARSEMLA_FLOAT32 = 0,
  SPARSEMLA_BFLOAT16 = 1,
  SPARSEMLA_FLOAT16 = 2,
  SPARSEMLA_FLOAT8_E4M3 = 3,      /* OCP e4m3fn */
  SPARSEMLA_FLOAT8_E4M3_FNUZ = 4, /* AMD e4m3fnuz */
  SPARSEMLA_INT32 = 16            /* index arrays only */
};

/* How one row (one token) of the latent cache is stored. */
typedef int32_t sparsemla_cache_format;
enum {
  SPARSEMLA_CACHE_FLOAT32 = 0,
  SPARSEMLA_CACHE_BFLOAT16 = 1,
  SPARSEMLA_CACHE_FLOAT16 = 2,
  SPARSEMLA_CACHE_FP8_E4M3 = 3,      /* value = code * kv_scale */
  SPARSEMLA_CACHE_FP8_E4M3_FNUZ = 4, /* the same for AMD caches */
  SPARSEMLA_CACHE_FP8_DS_MLA = 5     /* 656 bytes: 512 e4m3fn codes, 4 float32 scales, 64 bf16 */
};

/* A strided array in the caller's memory. An array that is not given has ndim 0. */
typedef struct sparsemla_tensor {
  void* data; /* element [0, 0, ...]; inputs are only read */
  sparsemla_dtype dtype;
  int32_t ndim;       /* as the parameter asks, at most 3 */
  int64_t shape[3];   /* first `ndim` entries */
  int64_t strides[3]; /* in elements; all zero: packed, last index fastest */
} sparsemla_tensor;

#define SPARSEMLA_NO_TENSOR                  \
  {                                          \
    NULL, SPARSEMLA_FLOAT32, 0, {0, 0, 0}, { \
      0, 0, 0                                \
    }                                        \
  }

/* The sizes of multi-head latent attention on this rank. */
typedef struct sparsemla_dims {
  int32_t num_heads;        /* query heads, 1..128 */
  int32_t kv_lora_rank;     /* latent width = width of the value and of the output */
  int32_t qk_rope_head_dim; /* rotary width of query and key; 0: rope-free */
} sparsemla_dims;

#define SPARSEMLA_DIMS_INIT \
  { 0, 512, 64 }

/* ---- back ends ----------------------------------------------------------------------------- */

typedef struct sparsemla_backend sparsemla_backend;

typedef void (*sparsemla_task)(void* argument, int32_t index);
/* Runs `task(argument, i)` once for every i in [0, count) and returns when all are done. If it runs
 * other indices than those, or a C++ exception leaves it, the stage that called it returns
 * SPARSEMLA_INTERNAL and its outputs are undefined. */
typedef void (*sparsemla_parallel_for)(void* context, int32_t count, sparsemla_task task,
                                       void* argument);

typedef struct sparsemla_backend_options {
  uint32_t struct_size;
  /* cpu: threads of the library's pool; 0: SPARSEMLA_NUM_THREADS, then all cores. With a
   * parallel_for: the most tasks that it runs at a time, at least 1. */
  int32_t num_threads;
  const char* kernel; /* kernel to force; null: SPARSEMLA_CPU_KERNEL, then the best */
  sparsemla_parallel_for parallel_for; /* cpu: threads of the caller; null: the library's pool */
  void* parallel_for_context;
} sparsemla_backend_options;

#define SPARSEMLA_BACKEND_OPTIONS_INIT \
  { sizeof(sparsemla_backend_options), 0, NULL, NULL, NULL }

/* Creates a back end: "cpu", "ref", or "" for SPARSEMLA_BACKEND, then the best that works here.
 * `options` may be null: all defaults. */
SPARSEMLA_API sparsemla_status sparsemla_backend_create(const char* name,
                                                        const sparsemla_backend_options* options,
                                                        sparsemla_backend** backend);

/* Plans do not depend on their back end and may outlive it. Null is allowed. */
SPARSEMLA_API void sparsemla_backend_destroy(sparsemla_backend* backend);

typedef struct sparsemla_device_info {
  uint32_t struct_size;
  int32_t num_compute_units; /* what sparsemla_plan_capacity should say */
  int32_t num_threads;       /* host threads that run work; 0 on devices */
  const char* backend;       /* "cpu" */
  const char* name;          /* "AMD EPYC, 2 threads" */
  const char* features;      /* instruction sets or architecture */
} sparsemla_device_info;

SPARSEMLA_API sparsemla_status sparsemla_backend_device(const sparsemla_backend* backend,
                                                        sparsemla_device_info* info);

typedef struct sparsemla_kernel_info {
  uint32_t struct_size;
  int32_t selected;               /* 1: runs if nothing else is forced */
  const char* name;               /* "attention_portable" */
  const char* unavailable_reason; /* "": this machine can run it */
} sparsemla_kernel_info;

/* Kernels, best first: `index` counts from 0; an index past the last is an error that names their
 * number, which sparsemla_backend_num_kernels returns (0 for a null back end). */
SPARSEMLA_API int32_t sparsemla_backend_num_kernels(const sparsemla_backend* backend);
SPARSEMLA_API sparsemla_status sparsemla_backend_kernel(const sparsemla_backend* backend,
                                                        int32_t index, sparsemla_kernel_info* info);

typedef struct sparsemla_problem {
  uint32_t struct_size;
  sparsemla_dims dims;
  sparsemla_dtype q_dtype;
  sparsemla_cache_format cache_format;
  sparsemla_dtype out_dtype;
} sparsemla_problem;

#define SPARSEMLA_PROBLEM_INIT                                                                    \
  {                                                                                               \
    sizeof(sparsemla_problem), SPARSEMLA_DIMS_INIT, SPARSEMLA_BFLOAT16, SPARSEMLA_CACHE_BFLOAT16, \
        SPARSEMLA_BFLOAT16                                                                        \
  }

/* Why this problem cannot be solved here: `*reason` is "" if it can. Valid until the thread's next
 * call of this function. */
SPARSEMLA_API sparsemla_status sparsemla_backend_unsupported_reason(
    const sparsemla_backend* backend, const sparsemla_problem* problem, const char** reason);

/* ---- planning ------------------------------------------------------------------------------ */

typedef struct sparsemla_plan sparsemla_plan;

/* Which rule cuts rows into work items. */
typedef int32_t sparsemla_schedule_kind;
enum {
  SPARSEMLA_SCHEDULE_BALANCED = 0, /* minimal longest worker */
  SPARSEMLA_SCHEDULE_AITER = 1     /* AITER's get_mla_metadata_v1, fast mode */
};

/* The AMD target that an aiter schedule is for. */
typedef int32_t sparsemla_aiter_target;
enum { SPARSEMLA_AITER_GFX942 = 0, SPARSEMLA_AITER_GFX950 = 1 };

/* Limits given once; they size every buffer of the plan and the workspace. */
typedef struct sparsemla_plan_capacity {
  uint32_t struct_size;
  sparsemla_schedule_kind schedule;
  int32_t num_compute_units; /* workers to plan for: num_compute_units of the back end */
  int32_t max_num_tokens;    /* query tokens of a step, padding rows included */
  int32_t max_num_reqs;
  int32_t topk_tokens;                 /* most keys of a row */
  sparsemla_dims dims;                 /* num_heads is an upper bound */
  int32_t max_splits;                  /* most pieces of a row; 0: chosen from the lengths */
  int32_t batch_invariant;             /* 1: a row's cut depends on that row alone; balanced only */
  sparsemla_aiter_target aiter_target; /* aiter only */
} sparsemla_plan_capacity;

#define SPARSEMLA_PLAN_CAPACITY_INIT                                             \
  {                                                                              \
    sizeof(sparsemla_plan_capacity), SPARSEMLA_SCHEDULE_BALANCED, 0, 0, 0, 2048, \
        SPARSEMLA_DIMS_INIT, 0, 0, SPARSEMLA_AITER_GFX942                        \
  }

/* Allocates all memory of a plan; sparsemla_plan_build allocates nothing. */
SPARSEMLA_API sparsemla_status sparsemla_plan_create(const sparsemla_plan_capacity* capacity,
                                                     sparsemla_plan** plan);

/* Null is allowed. */
SPARSEMLA_API void sparsemla_plan_destroy(sparsemla_plan* plan);

/* Bytes of scratch that sparsemla_run (and so every stage) needs for any step within the capacity
 * where topk_indices is `topk_width` wide (0: at most capacity.topk_tokens). The memory must be
 * aligned to 64 bytes; its contents never matter. */
SPARSEMLA_API sparsemla_status sparsemla_workspace_bytes(const sparsemla_backend* backend,
                                                         const sparsemla_plan_capacity* capacity,
                                                         int32_t topk_width, size_t* bytes);

/* One step. */
typedef struct sparsemla_plan_params {
  uint32_t struct_size;
  int32_t num_reqs;
  int32_t num_tokens; /* rows, >= the last query_start_loc; the rest is padding. -1: no padding */
  sparsemla_dims dims;
  sparsemla_dtype q_dtype;
  sparsemla_cache_format cache_format;
  int32_t topk_tokens;
  int32_t max_splits;              /* 0: the capacity's; otherwise at most the capacity's */
  int32_t reorder_batch_threshold; /* requests of at most so many query tokens are decodes */
  const int32_t* query_start_loc;  /* [num_reqs + 1], starts with 0, non-decreasing */
  const int32_t* seq_lens;         /* [num_reqs], cached tokens, this step's included; 0: a dummy */
} sparsemla_plan_params;

#define SPARSEMLA_PLAN_PARAMS_INIT                                                 \
  {                                                                                \
    sizeof(sparsemla_plan_params), 0, -1, SPARSEMLA_DIMS_INIT, SPARSEMLA_BFLOAT16, \
        SPARSEMLA_CACHE_BFLOAT16, 2048, 0, 1, NULL, NULL                           \
  }

/* Plans a step. The arrays of `params` are host memory and are copied: the caller may overwrite
 * them at once. The plan's arrays keep their addresses. `*changed` (may be null) becomes 0 if every
 * array is as it was before, else 1. On an error the plan is as it was before. */
SPARSEMLA_API sparsemla_status sparsemla_plan_build(sparsemla_plan* plan,
                                                    const sparsemla_plan_params* params,
                                                    int* changed);

/* What was planned; all zero and null while nothing has been. */
typedef struct sparsemla_plan_info {
  uint32_t struct_size;
  int32_t built;        /* 1: a sparsemla_plan_build has succeeded */
  uint64_t generation;  /* increases with every build that changed something */
  uint64_t fingerprint; /* of everything the plan depends on; equal on all machines */
  sparsemla_dims dims;
  sparsemla_dtype q_dtype;
  sparsemla_cache_format cache_format;
  int32_t num_tokens;
  int32_t num_reqs;
  int32_t topk_tokens;
  int32_t max_splits; /* the cap in force */
  int32_t max_query_len;
  int32_t max_seq_len;
  int32_t num_decodes; /* the batch is decodes, then prefills */
  int32_t num_prefills;
  int32_t num_decode_tokens;
  int32_t num_prefill_tokens;
  int64_t num_kv_indices;          /* keys of all rows: the last of kv_indptr */
  int64_t num_kv_indptr_padded;    /* max_num_tokens + 1 */
  const int32_t* req_id_per_token; /* [num_tokens]; padding rows say 0 */
  const int32_t* kv_indptr;        /* [num_tokens + 1] */
  const int32_t* kv_indptr_padded; /* [num_kv_indptr_padded], the tail repeats the total */
} sparsemla_plan_info;

SPARSEMLA_API sparsemla_status sparsemla_plan_get_info(const sparsemla_plan* plan,
                                                       sparsemla_plan_info* info);

/* One contiguous key range of one virtual row on one worker. Virtual row v is row v / fold, heads
 * [(v % fold) * heads_per_item, + heads_per_item). */
typedef struct sparsemla_work_item {
  int32_t batch_idx;   /* virtual row */
  int32_t partial_row; /* row of the partial buffers to write; -1: the whole row, write `out` */
  int32_t row_begin;   /* virtual row range, end exclusive */
  int32_t row_end;
  int32_t kv_begin; /* positions in kv_indices, end exclusive */
  int32_t kv_end;
  int32_t kv_offset; /* (end of the row's keys) - kv_end */
  int32_t pad;
} sparsemla_work_item;

/* Virtual rows, end exclusive, that one group of partials is merged into. */
typedef struct sparsemla_row_range {
  int32_t begin;
  int32_t end;
} sparsemla_row_range;

/* Who does what; the arrays lie in the plan. */
typedef struct sparsemla_schedule {
  uint32_t struct_size;
  int32_t num_compute_units;
  int32_t fold;           /* virtual rows per row */
  int32_t heads_per_item; /* num_heads / fold */
  int32_t num_virtual_rows;
  int32_t num_work_items;
  int32_t num_partials;                        /* rows of the partial buffers */
  const int32_t* work_indptr;                  /* [num_compute_units + 1] into work_items */
  const sparsemla_work_item* work_items;       /* [num_work_items], in worker order */
  const int32_t* reduce_indptr;                /* [num_virtual_rows + 1] into reduce_partial_map */
  const sparsemla_row_range* reduce_final_map; /* [num_virtual_rows]; where a row has partials */
  const int32_t* reduce_partial_map;           /* [num_partials] rows of the partial buffers */
} sparsemla_schedule;

SPARSEMLA_API sparsemla_status sparsemla_plan_get_schedule(const sparsemla_plan* plan,
                                                           sparsemla_schedule* schedule);

typedef struct sparsemla_aiter_size_params {
  uint32_t struct_size;
  sparsemla_aiter_target target;
  int32_t num_compute_units;
  int32_t max_num_tokens;
  int32_t num_heads;       /* a multiple of 8 */
  sparsemla_dtype q_dtype; /* bf16 or an fp8 type */
  sparsemla_cache_format cache_format;
} sparsemla_aiter_size_params;

#define SPARSEMLA_AITER_SIZE_PARAMS_INIT                                                      \
  {                                                                                           \
    sizeof(sparsemla_aiter_size_params), SPARSEMLA_AITER_GFX942, 0, 0, 0, SPARSEMLA_BFLOAT16, \
        SPARSEMLA_CACHE_BFLOAT16                                                              \
  }

/* Buffer sizes of AITER's get_mla_metadata_info_v1, in elements. */
typedef struct sparsemla_aiter_buffer_sizes {
  uint32_t struct_size;
  int64_t work_meta_data;
  int64_t work_indptr;
  int64_t work_info_set; /* rows of 8 */
  int64_t reduce_indptr;
  int64_t reduce_final_map; /* rows of 2 */
  int64_t reduce_partial_map;
} sparsemla_aiter_buffer_sizes;

SPARSEMLA_API sparsemla_status sparsemla_get_aiter_buffer_sizes(
    const sparsemla_aiter_size_params* params, sparsemla_aiter_buffer_sizes* sizes);

/* ---- indices ------------------------------------------------------------------------------- */

typedef struct sparsemla_fit_kpool_indices_params {
  uint32_t struct_size;
  int32_t topk_tokens;           /* K */
  sparsemla_tensor topk_indices; /* int32 [num_tokens, W], W >= K: history, then tail */
  sparsemla_tensor fitted;       /* int32 [num_tokens, K], written; not needed if W = K */
} sparsemla_fit_kpool_indices_params;

#define SPARSEMLA_FIT_KPOOL_INDICES_PARAMS_INIT \
  { sizeof(sparsemla_fit_kpool_indices_params), 0, SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR }

/* Fits the rows of a k-pool indexer to K columns: all valid tail entries stay, the valid history
 * fills what is left before them, the rest is -1. `*result` describes the fitted indices: the input
 * itself if W = K. */
SPARSEMLA_API sparsemla_status sparsemla_fit_kpool_indices(
    const sparsemla_backend* backend, const sparsemla_fit_kpool_indices_params* params,
    void* stream, sparsemla_tensor* result);

typedef struct sparsemla_convert_indices_params {
  uint32_t struct_size;
  int32_t num_tokens;
  int32_t block_size;              /* tokens of a cache block, >= 1 */
  int32_t invalid_slot;            /* written for entries that name no row */
  sparsemla_tensor topk_indices;   /* int32 [>= num_tokens, W] positions in the request */
  sparsemla_tensor block_table;    /* int32 [num_reqs, max_blocks]; outside [0, num_blocks): none */
  int64_t num_blocks;              /* blocks of the cache */
  int64_t block_stride_rows;       /* distance of two blocks in rows; 0: block_size */
  const int32_t* req_id_per_token; /* [num_tokens] */
  const int32_t* kv_indptr;        /* [num_tokens + 1] */
  int32_t* kv_indices;             /* [num_kv_indices], written */
  int64_t num_kv_indices;          /* at least the last of kv_indptr */
} sparsemla_convert_indices_params;

#define SPARSEMLA_CONVERT_INDICES_PARAMS_INIT                                                     \
  {                                                                                               \
    sizeof(sparsemla_convert_indices_params), 0, 0, -1, SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR, \
        0, 0, NULL, NULL, NULL, 0                                                                 \
  }

/* Translates positions in requests to cache slots, row t to [kv_indptr[t], kv_indptr[t + 1]). A
 * position that is negative or in an unmapped block, and a column beyond W, give invalid_slot,
 * wherever they stand. */
SPARSEMLA_API sparsemla_status sparsemla_convert_indices(
    const sparsemla_backend* backend, const sparsemla_convert_indices_params* params, void* stream);

typedef struct sparsemla_convert_indices_dense_params {
  uint32_t struct_size;
  int32_t num_tokens;
  int32_t block_size;
  int32_t invalid_slot;
  sparsemla_tensor topk_indices; /* int32 [>= num_tokens, W] */
  sparsemla_tensor block_table;  /* as above */
  int64_t num_blocks;
  int64_t block_stride_rows;
  const int32_t* req_id_per_token; /* [num_tokens] */
  sparsemla_tensor slots;          /* int32 [>= num_tokens, W], written */
  int32_t* valid_counts;           /* [num_tokens] entries that name a row, written; may be null */
} sparsemla_convert_indices_dense_params;

#define SPARSEMLA_CONVERT_INDICES_DENSE_PARAMS_INIT                                \
  {                                                                                \
    sizeof(sparsemla_convert_indices_dense_params), 0, 0, -1, SPARSEMLA_NO_TENSOR, \
        SPARSEMLA_NO_TENSOR, 0, 0, NULL, SPARSEMLA_NO_TENSOR, NULL                 \
  }

/* The same translation for a padded matrix of all W columns. */
SPARSEMLA_API sparsemla_status
sparsemla_convert_indices_dense(const sparsemla_backend* backend,
                                const sparsemla_convert_indices_dense_params* params, void* stream);

/* ---- attention ----------------------------------------------------------------------------- */

typedef struct sparsemla_attention_params {
  uint32_t struct_size;
  sparsemla_cache_format cache_format;
  float softmax_scale; /* multiplies q.k */
  float q_scale;       /* per-tensor fp8 caches: value = code * scale; otherwise 1 */
  float kv_scale;
  int32_t write_empty_rows;  /* 0: rows without keys are left as they are */
  sparsemla_tensor q;        /* [rows, num_heads, kv_lora_rank + qk_rope_head_dim] absorbed query */
  sparsemla_tensor ql_nope;  /* or its parts: [rows, num_heads, kv_lora_rank] */
  sparsemla_tensor q_pe;     /* [rows, num_heads, qk_rope_head_dim]; none if rope-free */
  const void* kv_cache;      /* slot s lies at kv_cache + s * row_stride_bytes */
  int64_t num_slots;         /* rows that may be addressed, at most 2^31 - 1 */
  int64_t row_stride_bytes;  /* 0: packed */
  const int32_t* kv_indices; /* [num_kv_indices] slots; outside the cache: skipped */
  int64_t num_kv_indices;    /* at least that of the plan; both unused by sparsemla_run */
  const float* sinks;        /* [num_heads] logits without a value row; null: none */
  sparsemla_tensor out;      /* [rows, num_heads, kv_lora_rank] bf16, fp16 or fp32, written */
  sparsemla_tensor lse;      /* float32 [rows, num_heads] natural log, written; may be none */
} sparsemla_attention_params;

#define SPARSEMLA_ATTENTION_PARAMS_INIT                                                           \
  {                                                                                               \
    sizeof(sparsemla_attention_params), SPARSEMLA_CACHE_BFLOAT16, 0.0f, 1.0f, 1.0f, 1,            \
        SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR, NULL, 0, 0, NULL, 0, NULL, \
        SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR                                                  \
  }

/* Runs the plan's work items: rows that one item covers go to `out` and `lse` (sinks applied),
 * pieces of split rows to the workspace, for sparsemla_merge. Padding rows of the arrays beyond the
 * plan's num_tokens are never touched. */
SPARSEMLA_API sparsemla_status sparsemla_attention(const sparsemla_backend* backend,
                                                   const sparsemla_attention_params* params,
                                                   const sparsemla_plan* plan, void* workspace,
                                                   size_t workspace_bytes, void* stream);

/* Partial attention states and the rows that they belong to. */
typedef struct sparsemla_partials {
  uint32_t struct_size;
  int32_t fold;                 /* `out` holds virtual rows of num_heads / fold heads */
  sparsemla_tensor out;         /* float32 [num_partials, heads, kv_lora_rank], normalised */
  sparsemla_tensor lse;         /* float32 [num_partials, heads], natural log, without sinks */
  const int32_t* reduce_indptr; /* [num_groups + 1] into reduce_partial_map */
  const sparsemla_row_range* reduce_final_map; /* [num_groups] */
  const int32_t* reduce_partial_map;           /* [num_reduce_partials] rows of `out` and `lse` */
  int64_t num_groups;
  int64_t num_reduce_partials;
} sparsemla_partials;

#define SPARSEMLA_PARTIALS_INIT                                                                   \
  {                                                                                               \
    sizeof(sparsemla_partials), 1, SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR, NULL, NULL, NULL, 0, \
        0                                                                                         \
  }

/* The partials that sparsemla_attention left in `workspace`; valid until its next use. */
SPARSEMLA_API sparsemla_status sparsemla_plan_partials(const sparsemla_plan* plan, void* workspace,
                                                       size_t workspace_bytes,
                                                       sparsemla_partials* partials);

typedef struct sparsemla_merge_params {
  uint32_t struct_size;
  int32_t write_empty_rows; /* 0: heads without a live partial are left as they are */
  const sparsemla_partials* partials;
  const float* sinks;   /* [num_heads], added once here; null: none */
  sparsemla_tensor out; /* [rows, num_heads, kv_lora_rank] bf16, fp16 or fp32, written */
  sparsemla_tensor lse; /* float32 [rows, num_heads], written; may be none */
} sparsemla_merge_params;

#define SPARSEMLA_MERGE_PARAMS_INIT \
  { sizeof(sparsemla_merge_params), 1, NULL, NULL, SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR }

/* Merges each group of partials into its row and adds the sinks. Serves the pieces of split rows
 * and the states of several ranks alike. */
SPARSEMLA_API sparsemla_status sparsemla_merge(const sparsemla_backend* backend,
                                               const sparsemla_merge_params* params, void* stream);

typedef struct sparsemla_run_params {
  uint32_t struct_size;
  int32_t block_size;            /* tokens of a cache block, >= 1 */
  sparsemla_tensor topk_indices; /* int32 [>= num_tokens, W]; W > topk_tokens: k-pool rows */
  sparsemla_tensor block_table;  /* int32 [num_reqs, max_blocks] */
  int64_t num_blocks;
  int64_t block_stride_rows; /* 0: block_size */
  const sparsemla_attention_params* attention;
} sparsemla_run_params;

#define SPARSEMLA_RUN_PARAMS_INIT \
  { sizeof(sparsemla_run_params), 0, SPARSEMLA_NO_TENSOR, SPARSEMLA_NO_TENSOR, 0, 0, NULL }

/* One attention call: all stages in order. */
SPARSEMLA_API sparsemla_status sparsemla_run(const sparsemla_backend* backend,
                                             const sparsemla_run_params* params,
                                             const sparsemla_plan* plan, void* workspace,
                                             size_t workspace_bytes, void* stream);

/* ---- memory for caches --------------------------------------------------------------------- */

/* Maps `bytes` of zeroed host memory, aligned to 2 MB, and asks the system for transparent huge
 * pages; what it does not grant are normal pages. Pages exist once they are written, on the NUMA
 * node of the thread that does so. `*data` becomes null for 0 bytes. Since version 1.1, as is all
 * of this section. */
SPARSEMLA_API sparsemla_status sparsemla_huge_pages_allocate(size_t bytes, void** data);

/* Frees what sparsemla_huge_pages_allocate gave for as many bytes. Null is allowed. */
SPARSEMLA_API void sparsemla_huge_pages_free(void* data, size_t bytes);

/* How many of `bytes` bytes from `data` on lie on huge pages at this moment: exact for a whole
 * allocation of the above; the most it can be where the range is only a part of a mapping.
 * SPARSEMLA_UNSUPPORTED where the system does not tell. */
SPARSEMLA_API sparsemla_status sparsemla_huge_pages_count(const void* data, size_t bytes,
                                                          size_t* huge_bytes);

#ifdef __cplusplus
}
#endif

#endif /* SPARSEMLA_SPARSEMLA_H_ */

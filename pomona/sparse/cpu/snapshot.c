/* The comparison of a model with its state at an earlier time: pomona/sparse/network/native_snapshot.py.
 *
 * This file is compiled once for each instruction set, NAME, and each compilation has the same functions. They read Python
 * objects by functions of Python's stable interface and tensors by functions of PyTorch, and get their addresses from
 * the caller: one library serves all versions of both. The caller holds Python's lock, and keeps all objects alive.
 *
 * With cold caches, nearly all of the time is for loads from thousands of places. They are therefore announced first:
 * prefetches need no address to be right, so that where objects have their pointers is a hint and nothing depends on it.
 */

#include <stdint.h>
#include <string.h>

#define NAMED_(level, name) pomona_##level##_##name
#define NAMED(level, name) NAMED_(level, name)
#define PUBLIC(name) __attribute__((visibility("default"))) NAMED(NAME, name)

#define INLINE static inline __attribute__((always_inline)) /* a call of a function that only prefetches is removed */

#define LINE 64             /* bytes of a cache line */
#define HEADER 96           /* bytes of a dictionary's table before its entries, about */
#define ENTRY 16            /* bytes of an entry */
#define TENSOR_LINES 2      /* of a C++ tensor */
#define DICT_WORDS {4, 5}   /* that point to the table and, in some dictionaries, to the values */
#define TENSOR_WORDS {2, 5} /* that point to the storage and to the version */

/* The functions that are called. */
typedef struct {
  int (*next_entry)(void *dict, intptr_t *position, void **key, void **value); /* PyDict_Next */
  intptr_t (*dict_size)(void *dict);                                         /* PyDict_Size */
  intptr_t (*list_size)(void *list);                                         /* PyList_Size */
  void *(*list_item)(void *list, intptr_t i);                                /* PyList_GetItem */
  int32_t (*data_address)(void *const *tensor, void **data);                 /* aoti_torch_get_data_ptr */
  int32_t (*dimensions)(void *const *tensor, int64_t *count);                /* aoti_torch_get_dim */
  int32_t (*sizes)(void *const *tensor, int64_t **sizes);                    /* aoti_torch_get_sizes */
  int32_t (*strides)(void *const *tensor, int64_t **strides);                /* aoti_torch_get_strides */
  int64_t (*version)(void *const *tensor);                                   /* at::TensorBase::_version */
} Functions;

/* A dictionary or list, and how many members it has. */
typedef struct {
  void *object;
  int64_t count;
} Container;

/* A tensor: where Python's object holds it, what it held, the address of its values, its version or -1, and the number of
 * its dimensions. */
typedef struct {
  void *const *handle;
  void *held;
  void *data;
  int64_t version, dimensions;
} TensorState;

/* Memory whose contents are compared. */
typedef struct {
  const char *address;
  int64_t bytes;
} Memory;

typedef struct {
  const Functions *call;
  int64_t empty_count, dict_count, list_count, tensor_count, vector_count;
  void *const *empty; /* dictionaries without entries */
  const Container *dicts, *lists;
  const TensorState *tensors;
  const Memory *vectors;
  void *const *members;   /* keys and values of the dictionaries, and then the items of the lists, one after another */
  const int64_t *layouts; /* of the tensors, one after another: the sizes and then the strides */
  const char *contents;   /* of the vectors, one after another */
} Snapshot;

/* Announce a load of some lines from an address. */
INLINE void announce_lines(const char *address, int64_t count) {
  for (int64_t line = 0; line < count; line++) __builtin_prefetch(address + line * LINE);
}

/* Announce loads from all objects, and then from those to which they point. */
INLINE void announce(const Snapshot *s) {
  const int dict_words[] = DICT_WORDS, tensor_words[] = TENSOR_WORDS;
  for (int64_t i = 0; i < s->dict_count; i++) __builtin_prefetch(s->dicts[i].object);
  for (int64_t i = 0; i < s->tensor_count; i++) {
    __builtin_prefetch(s->tensors[i].handle);
    announce_lines(s->tensors[i].held, TENSOR_LINES);
  }
  for (int64_t i = 0; i < s->dict_count; i++)
    for (int k = 0; k < 2; k++) {
      const char *table = ((char *const *)s->dicts[i].object)[dict_words[k]];
      if (table) announce_lines(table, (HEADER + s->dicts[i].count * ENTRY) / LINE + 1);
    }
  for (int64_t i = 0; i < s->tensor_count; i++) {
    char *const *tensor = *s->tensors[i].handle; /* not what it held, which may be gone */
    for (int k = 0; tensor && k < 2; k++) __builtin_prefetch(tensor[tensor_words[k]]);
  }
}

static int are_empty(const Snapshot *s) {
  for (int64_t i = 0; i < s->empty_count; i++)
    if (s->call->dict_size(s->empty[i]) != 0) return 0;
  return 1;
}

/* Return whether all containers have the same members, in the same order. */
static int have_same_members(const Snapshot *s) {
  void *const *members = s->members;
  for (int64_t i = 0; i < s->dict_count; i++) {
    void *key, *value;
    intptr_t position = 0;
    int64_t count = 0;
    for (; s->call->next_entry(s->dicts[i].object, &position, &key, &value); count++, members += 2)
      if (count == s->dicts[i].count || key != members[0] || value != members[1]) return 0;
    if (count != s->dicts[i].count) return 0;
  }
  for (int64_t i = 0; i < s->list_count; i++) {
    if (s->call->list_size(s->lists[i].object) != s->lists[i].count) return 0;
    for (int64_t k = 0; k < s->lists[i].count; k++)
      if (s->call->list_item(s->lists[i].object, k) != *members++) return 0;
  }
  return 1;
}

static int has_same_layout(const Functions *call, const TensorState *t, const int64_t *layout) {
  int64_t count, *sizes, *strides;
  if (call->dimensions(t->handle, &count) != 0 || count != t->dimensions) return 0;
  if (call->sizes(t->handle, &sizes) != 0 || call->strides(t->handle, &strides) != 0) return 0;
  for (int64_t i = 0; i < count; i++)
    if (sizes[i] != layout[i] || strides[i] != layout[count + i]) return 0;
  return 1;
}

static int are_same_tensors(const Snapshot *s) {
  const int64_t *layout = s->layouts;
  for (const TensorState *t = s->tensors; t < s->tensors + s->tensor_count; layout += 2 * t->dimensions, t++) {
    void *data;
    if (*t->handle != t->held) return 0; /* swapped with another */
    if (s->call->data_address(t->handle, &data) != 0 || data != t->data) return 0;
    if (!has_same_layout(s->call, t, layout)) return 0;
    if (t->version >= 0 && s->call->version(t->handle) != t->version) return 0;
  }
  return 1;
}

static int has_same_contents(const Snapshot *s) {
  const char *contents = s->contents;
  for (const Memory *m = s->vectors; m < s->vectors + s->vector_count; contents += m->bytes, m++)
    if (memcmp(m->address, contents, m->bytes) != 0) return 0;
  return 1;
}

static int has_same_tensors(const Snapshot *s) {
  return are_empty(s) && are_same_tensors(s) && has_same_contents(s);
}

/* ---- public functions: 1 or 0 */

/* Return whether the dictionaries that were empty are, and the tensors and vectors are as they were. */
int PUBLIC(snapshot_has_same_tensors)(const Snapshot *s) { return has_same_tensors(s); }

/* Return whether, besides, all containers have the same members. */
int PUBLIC(snapshot_matches)(const Snapshot *s) {
  announce(s);
  return have_same_members(s) && has_same_tensors(s);
}

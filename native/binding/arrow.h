/*
 * The structs of Arrow's C data interface and C stream interface, whose layout and constants its
 * specification fixes. A struct whose `release` is NULL is empty: it was released, or moved out.
 */
#ifndef SHMQ_ARROW_H
#define SHMQ_ARROW_H

#include <stdint.h>

typedef struct ArrowSchema {
	const char *format, *name, *metadata;
	int64_t flags, n_children;
	struct ArrowSchema **children, *dictionary;
	void (*release)(struct ArrowSchema *);
	void *private_data;
} ArrowSchema;

typedef struct ArrowArray {
	int64_t length, null_count; /* null_count: -1 if nobody has counted */
	int64_t offset;             /* of the first value in the buffers, and in those of children */
	int64_t n_buffers, n_children;
	const void **buffers;
	struct ArrowArray **children, *dictionary;
	void (*release)(struct ArrowArray *);
	void *private_data;
} ArrowArray;

typedef struct ArrowArrayStream {
	int (*get_schema)(struct ArrowArrayStream *, ArrowSchema *to); /* 0 or an errno, as the next */
	int (*get_next)(struct ArrowArrayStream *, ArrowArray *to);    /* an empty struct at the end */
	const char *(*get_last_error)(struct ArrowArrayStream *);
	void (*release)(struct ArrowArrayStream *);
	void *private_data;
} ArrowArrayStream;

/* The names of the capsules that hold them. */
#define ARROW_SCHEMA "arrow_schema"
#define ARROW_ARRAY "arrow_array"
#define ARROW_STREAM "arrow_array_stream"

#endif

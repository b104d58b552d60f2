/*
 * The methods of _native.Producer for bodies that come through Arrow's C data interface: columns of
 * binary and string, of any library. They are read where they lie and copied once, to shared memory.
 *
 * The structs are another library's. Counts, offsets and lengths are checked where their meaning
 * can be known; the size of most buffers cannot.
 */
#include "arrow.h"
#include "types.h"

#include <stdlib.h>
#include <string.h>

enum layout { OFFSETS, WIDE_OFFSETS, FIXED, VIEWS };

typedef struct column_type {
	enum layout layout;
	int64_t width; /* of each body, if it is FIXED */
} column_type;

typedef struct view {
	int32_t length;
	union {
		char inlined[12];
		struct {
			char prefix[4];
			int32_t buffer, offset;
		} far; /* a body of more than 12 bytes */
	} at;
} view;

#define INLINED 12

static bool malformed(const producer_object *self, const char *why)
{
	PyErr_Format(PyExc_ValueError, "publish to '%U': the Arrow array is malformed: %s", self->topic,
	             why);
	return false;
}

/* ---- type ----------------------------------------------------------------------------------- */

/* Returns false with an exception if it has no bodies. */
static bool type_of(const producer_object *self, const ArrowSchema *schema, column_type *type)
{
	static const char *const formats[] = {"z", "u", "Z", "U", "vz", "vu"};
	const char *format = schema->release ? schema->format : NULL;

	if (!format)
		return malformed(self, "its schema was released before");
	for (unsigned i = 0; i < sizeof(formats) / sizeof(*formats) && !schema->dictionary; i++) {
		*type = (column_type){.layout = i < 2 ? OFFSETS : i < 4 ? WIDE_OFFSETS : VIEWS};
		if (!strcmp(format, formats[i]))
			return true;
	}
	if (!strncmp(format, "w:", 2) && !schema->dictionary) {
		char *end;

		*type = (column_type){FIXED, strtoll(format + 2, &end, 10)};
		return (end != format + 2 && !*end && type->width >= 0) || malformed(self, "its width");
	}
	PyErr_Format(
			PyExc_TypeError,
			"publish_many takes an Arrow array of binary or string, not %s'%.40s': cast it, or "
			"give one column of a table",
			schema->dictionary ? "a dictionary with indices of format " : "format ", format);
	return false;
}

/* ---- check ---------------------------------------------------------------------------------- */

static int64_t nulls_of(const ArrowArray *array)
{
	const uint8_t *valid = array->buffers[0];
	int64_t nulls = 0;

	if (!array->null_count)
		return 0;
	for (int64_t i = array->offset; valid && i < array->offset + array->length; i++)
		nulls += !(valid[i / 8] >> (i % 8) & 1);
	return nulls;
}

/* Returns false with an exception unless the array has the buffers of its type, and no nulls. */
static bool array_good(const producer_object *self, const column_type *type,
                       const ArrowArray *array)
{
	int64_t buffers = type->layout == FIXED ? 2 : 3, nulls;

	if (!array->release)
		return malformed(self, "it was released before");
	if (array->length < 0 || array->offset < 0 || array->length >= INT64_MAX / 16 - array->offset)
		return malformed(self, "its length and its offset");
	if (array->length > UINT32_MAX)
		return malformed(self, "more values than one batch may have");
	if (type->layout == VIEWS ? array->n_buffers < buffers : array->n_buffers != buffers)
		return malformed(self, "the number of its buffers");
	if (array->n_children || array->dictionary)
		return malformed(self, "it has children");
	if (!array->buffers)
		return malformed(self, "it has no buffers");
	if (!array->length)
		return true;
	if (!array->buffers[1])
		return malformed(self, "a buffer is missing");
	if (array->null_count > 0 && !array->buffers[0])
		return malformed(self, "it has nulls and does not say which");
	nulls = nulls_of(array);
	if (nulls)
		PyErr_Format(PyExc_ValueError,
		             "publish_many: %lld of the bodies are null; drop them, with pyarrow by "
		             "drop_null()",
		             (long long)nulls);
	return !nulls;
}

/* ---- bodies --------------------------------------------------------------------------------- */

/* These write the bodies of an array, and return NULL or what is wrong. */

static const char *bodies_by_offsets(const ArrowArray *array, bool wide, shmq_body *to)
{
	const int64_t *wide_at = (const int64_t *)array->buffers[1] + (wide ? array->offset : 0);
	const int32_t *at = (const int32_t *)array->buffers[1] + (wide ? 0 : array->offset);
	const char *data = array->buffers[2];
	int64_t from = wide ? wide_at[0] : at[0];
	bool good = from >= 0;

	for (int64_t i = 0; i < array->length && good; i++) {
		int64_t next = wide ? wide_at[i + 1] : at[i + 1];

		good = next >= from;
		to[i] = (shmq_body){data ? data + from : "", (uint64_t)(next - from)};
		from = next;
	}
	if (!good)
		return "an offset is negative or below the one before";
	return data || !from ? NULL : "a buffer is missing";
}

static const char *bodies_fixed(const ArrowArray *array, int64_t width, shmq_body *to)
{
	const char *data = array->buffers[1];

	if (width && array->offset + array->length > INT64_MAX / width)
		return "its width";
	for (int64_t i = 0; i < array->length; i++)
		to[i] = (shmq_body){data + (array->offset + i) * width, (uint64_t)width};
	return NULL;
}

static const char *bodies_by_views(const ArrowArray *array, shmq_body *to)
{
	const view *views = (const view *)array->buffers[1] + array->offset;
	int64_t parts = array->n_buffers - 3;
	const int64_t *sizes = array->buffers[array->n_buffers - 1];

	for (int64_t i = 0; i < array->length; i++) {
		const view *v = &views[i];
		const char *data = v->at.inlined;

		if (v->length < 0)
			return "a length is negative";
		if (v->length > INLINED) {
			int32_t part = v->at.far.buffer, from = v->at.far.offset;

			if (part < 0 || part >= parts || !sizes || !array->buffers[2 + part])
				return "a view points to a buffer that is missing";
			if (from < 0 || (int64_t)from + v->length > sizes[part])
				return "a view points outside its buffer";
			data = (const char *)array->buffers[2 + part] + from;
		}
		to[i] = (shmq_body){data, (uint64_t)v->length};
	}
	return NULL;
}

static bool bodies_of(const producer_object *self, const column_type *type, const ArrowArray *array,
                      shmq_body *to)
{
	const char *wrong = NULL;

	if (array->length && type->layout == FIXED)
		wrong = bodies_fixed(array, type->width, to);
	else if (array->length && type->layout == VIEWS)
		wrong = bodies_by_views(array, to);
	else if (array->length)
		wrong = bodies_by_offsets(array, type->layout == WIDE_OFFSETS, to);
	return !wrong || malformed(self, wrong);
}

/* ---- publish -------------------------------------------------------------------------------- */

/* The arrays of one column, which are published together. */
typedef struct column {
	column_type type;
	const ArrowArray *arrays;
	uint32_t n;
} column;

/* The last arguments of both methods. */
typedef struct sending {
	int64_t defer, timeout, ttl;
	PyObject *properties;
} sending;

/* Returns (first id, number of bodies). */
static PyObject *publish_column(producer_object *self, const column *from, const sending *how)
{
	shmq_body stack[BODIES_ON_STACK], *bodies;
	shmq_terms terms = terms_after(how->defer, how->ttl);
	property_blocks packed = {0};
	uint64_t first_id = 0, count = 0, at = 0;
	bool good = true;
	int r = -1;

	for (uint32_t i = 0; i < from->n && good; i++) {
		good = array_good(self, &from->type, &from->arrays[i]);
		count += good ? (uint64_t)from->arrays[i].length : 0;
	}
	if (good && count > UINT32_MAX)
		good = malformed(self, "more values than one batch may have");
	bodies = good ? bodies_new(stack, (Py_ssize_t)count) : NULL;
	if (!bodies)
		return NULL;
	for (uint32_t i = 0; i < from->n && good; i++) {
		good = bodies_of(self, &from->type, &from->arrays[i], bodies + at);
		at += (uint64_t)from->arrays[i].length;
	}
	if (good && property_blocks_open(&packed, how->properties, (Py_ssize_t)count) == 0) {
		bool large = bodies_large(bodies, (uint32_t)count);

		terms.properties = packed.blocks;
		r = count ? producer_put(self, bodies, (uint32_t)count, large, &terms, how->timeout,
		                         &first_id)
		          : 0;
	}
	property_blocks_close(&packed);
	if (bodies != stack)
		PyMem_Free(bodies);
	return r < 0 ? NULL : Py_BuildValue("(KK)", first_id, count);
}

/* The callbacks are another library's, perhaps Python, which no exception may meet. */
static void release_all(ArrowSchema *schema, ArrowArray *arrays, uint32_t n,
                        ArrowArrayStream *stream)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	for (uint32_t i = 0; i < n; i++)
		if (arrays[i].release)
			arrays[i].release(&arrays[i]);
	if (schema->release)
		schema->release(schema);
	if (stream)
		stream->release(stream);
	PyErr_Restore(type, value, trace);
}

METHOD(producer, publish_arrow, (OBJECT, schema)(OBJECT, array),
       (DELAY, defer, 0)(TIMEOUT, timeout, FOR_EVER)(OBJECT, properties, Py_None)(TTL, ttl, 0))
{
	const sending how = {defer, timeout, ttl, properties};
	ArrowSchema *its_schema = PyCapsule_GetPointer(schema, ARROW_SCHEMA), schema_moved;
	ArrowArray *its_array = its_schema ? PyCapsule_GetPointer(array, ARROW_ARRAY) : NULL, moved;
	column from = {.arrays = &moved, .n = 1};
	PyObject *published = NULL;

	if (!its_array)
		return NULL;
	schema_moved = *its_schema;
	moved = *its_array;
	its_schema->release = NULL;
	its_array->release = NULL;
	if (type_of(self, &schema_moved, &from.type))
		published = publish_column(self, &from, &how);
	release_all(&schema_moved, &moved, 1, NULL);
	return published;
}

/* ---- stream --------------------------------------------------------------------------------- */

static bool stream_failed(const producer_object *self, ArrowArrayStream *stream, int error)
{
	const char *why = stream->get_last_error ? stream->get_last_error(stream) : NULL;

	if (!PyErr_Occurred())
		PyErr_Format(PyExc_ValueError, "publish to '%U': the Arrow stream failed: %.300s",
		             self->topic, why ? why : strerror(error));
	return false;
}

/* Read all arrays of the stream; *arrays is to be freed, also if it fails. */
static bool stream_arrays(const producer_object *self, ArrowArrayStream *stream,
                          ArrowArray **arrays, uint32_t *n)
{
	uint32_t room = 0;

	for (;; ++*n) {
		int error;

		if (*n == room) {
			ArrowArray *more = PyMem_Realloc(*arrays, (room + 8) * 2 * sizeof(**arrays));

			if (!more) {
				PyErr_NoMemory();
				return false;
			}
			*arrays = more;
			room = (room + 8) * 2;
		}
		(*arrays)[*n] = (ArrowArray){0};
		error = stream->get_next(stream, &(*arrays)[*n]);
		if (error)
			return stream_failed(self, stream, error);
		if (!(*arrays)[*n].release)
			return true;
	}
}

METHOD(producer, publish_arrow_stream, (OBJECT, stream),
       (DELAY, defer, 0)(TIMEOUT, timeout, FOR_EVER)(OBJECT, properties, Py_None)(TTL, ttl, 0))
{
	const sending how = {defer, timeout, ttl, properties};
	ArrowArrayStream *its_stream = PyCapsule_GetPointer(stream, ARROW_STREAM), moved;
	PyObject *published = NULL;
	ArrowSchema schema = {0};
	ArrowArray *arrays = NULL;
	column from = {0};
	int error;

	if (!its_stream)
		return NULL;
	if (!its_stream->release) {
		malformed(self, "its stream was read before");
		return NULL;
	}
	moved = *its_stream;
	its_stream->release = NULL;
	error = moved.get_schema(&moved, &schema);
	if (error)
		stream_failed(self, &moved, error);
	else if (type_of(self, &schema, &from.type) && stream_arrays(self, &moved, &arrays, &from.n)) {
		from.arrays = arrays;
		published = publish_column(self, &from, &how);
	}
	release_all(&schema, arrays, from.n, &moved);
	PyMem_Free(arrays);
	return published;
}

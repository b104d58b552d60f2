/*
 * The methods of _native.Batch that export it through Arrow's C data interface: a struct of four
 * columns, as `Batch.to_arrow` returns them. The bodies and their offsets are those of the batch's
 * block. Nothing here points into shared memory, so what was exported outlives the broker.
 *
 * An importer may move the parts of a struct elsewhere and release them in any order, in any
 * thread and without the GIL. So each part has a share in what they all point into; the last one
 * to be released frees it.
 */
#include "arrow.h"
#include "types.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { ID, TIMESTAMP, ATTEMPTS, BODY, FIELDS };

static const struct {
	const char *name, *format;
	int64_t buffers; /* with that of the nulls, which is not there */
} fields[FIELDS] = {
	[ID] = {"id", "L", 2},
	[TIMESTAMP] = {"timestamp", "tsn:UTC", 2},
	[ATTEMPTS] = {"attempts", "S", 2},
	[BODY] = {"body", "Z", 3},
};

/* ---- schema --------------------------------------------------------------------------------- */

typedef struct shared_schema {
	atomic_uint shares;
	ArrowSchema children[FIELDS], *pointers[FIELDS];
} shared_schema;

static void schema_release(ArrowSchema *schema)
{
	shared_schema *shared = schema->private_data;

	for (int64_t i = 0; i < schema->n_children; i++)
		if (schema->children[i]->release)
			schema->children[i]->release(schema->children[i]);
	schema->release = NULL;
	if (atomic_fetch_sub(&shared->shares, 1) == 1)
		free(shared);
}

/* Returns 0 or ENOMEM. */
static int schema_make(ArrowSchema *to)
{
	shared_schema *shared = malloc(sizeof(*shared));

	if (!shared)
		return ENOMEM;
	atomic_init(&shared->shares, FIELDS + 1);
	for (int i = 0; i < FIELDS; i++) {
		shared->pointers[i] = &shared->children[i];
		shared->children[i] = (ArrowSchema){.format = fields[i].format,
		                                    .name = fields[i].name,
		                                    .release = schema_release,
		                                    .private_data = shared};
	}
	*to = (ArrowSchema){.format = "+s",
	                    .name = "",
	                    .n_children = FIELDS,
	                    .children = shared->pointers,
	                    .release = schema_release,
	                    .private_data = shared};
	return 0;
}

/* ---- array ---------------------------------------------------------------------------------- */

typedef struct shared_array {
	atomic_uint shares;
	PyObject *block; /* of the batch */
	ArrowArray children[FIELDS], *pointers[FIELDS];
	const void *nulls[1], *buffers[FIELDS][3];
	uint64_t fixed[]; /* the columns other than the bodies */
} shared_array;

static void array_release(ArrowArray *array)
{
	shared_array *shared = array->private_data;

	for (int64_t i = 0; i < array->n_children; i++)
		if (array->children[i]->release)
			array->children[i]->release(array->children[i]);
	array->release = NULL;
	if (atomic_fetch_sub(&shared->shares, 1) != 1)
		return;
	if (Py_IsInitialized()) { /* else the interpreter has ended, and its objects with it */
		PyGILState_STATE state = PyGILState_Ensure();

		Py_DECREF(shared->block);
		PyGILState_Release(state);
	}
	free(shared);
}

static void array_gather(const batch_object *batch, shared_array *shared)
{
	uint64_t *ids = shared->fixed;
	int64_t *timestamps = (int64_t *)(ids + batch->count);
	uint16_t *attempts = (uint16_t *)(timestamps + batch->count);

	for (uint32_t i = 0; i < batch->count; i++) {
		ids[i] = batch->messages[i].id;
		timestamps[i] = batch->messages[i].timestamp;
		attempts[i] = (uint16_t)batch->messages[i].attempts;
	}
	shared->buffers[ID][1] = ids;
	shared->buffers[TIMESTAMP][1] = timestamps;
	shared->buffers[ATTEMPTS][1] = attempts;
	shared->buffers[BODY][1] = batch->offsets;
	shared->buffers[BODY][2] = batch->data;
}

/* Returns 0, or -1 with an exception. */
static int array_make(batch_object *batch, ArrowArray *to)
{
	size_t each = sizeof(uint64_t) + sizeof(int64_t) + sizeof(uint16_t);
	PyObject *block = batch_block(batch);
	shared_array *shared = block ? calloc(1, sizeof(*shared) + batch->count * each) : NULL;

	if (!shared) {
		if (block)
			PyErr_NoMemory();
		return -1;
	}
	atomic_init(&shared->shares, FIELDS + 1);
	shared->block = Py_NewRef(block);
	array_gather(batch, shared);
	for (int i = 0; i < FIELDS; i++) {
		shared->pointers[i] = &shared->children[i];
		shared->children[i] = (ArrowArray){.length = batch->count,
		                                   .n_buffers = fields[i].buffers,
		                                   .buffers = shared->buffers[i],
		                                   .release = array_release,
		                                   .private_data = shared};
	}
	*to = (ArrowArray){.length = batch->count,
	                   .n_buffers = 1,
	                   .n_children = FIELDS,
	                   .buffers = shared->nulls,
	                   .children = shared->pointers,
	                   .release = array_release,
	                   .private_data = shared};
	return 0;
}

/* ---- stream --------------------------------------------------------------------------------- */

static int stream_schema(ArrowArrayStream *Py_UNUSED(stream), ArrowSchema *to)
{
	return schema_make(to);
}

/* The array of the batch, and then the end. */
static int stream_next(ArrowArrayStream *stream, ArrowArray *to)
{
	ArrowArray *array = stream->private_data;

	*to = *array;
	array->release = NULL;
	return 0;
}

static const char *stream_error(ArrowArrayStream *Py_UNUSED(stream))
{
	return NULL;
}

static void stream_release(ArrowArrayStream *stream)
{
	ArrowArray *array = stream->private_data;

	if (array->release)
		array->release(array);
	free(array);
	stream->release = NULL;
}

/* ---- capsules ------------------------------------------------------------------------------- */

#define CAPSULE(name, type, label)                                                                 \
	static void name##_capsule_free(PyObject *capsule)                                             \
	{                                                                                              \
		type *held = PyCapsule_GetPointer(capsule, label);                                         \
                                                                                                   \
		if (held->release)                                                                         \
			held->release(held);                                                                   \
		free(held);                                                                                \
	}                                                                                              \
                                                                                                   \
	/* Takes `made` over, also if it fails. */                                                     \
	static PyObject *name##_capsule(type *made)                                                    \
	{                                                                                              \
		type *held = malloc(sizeof(*held));                                                        \
		PyObject *capsule = NULL;                                                                  \
                                                                                                   \
		if (held) {                                                                                \
			*held = *made;                                                                         \
			capsule = PyCapsule_New(held, label, name##_capsule_free);                             \
		} else {                                                                                   \
			PyErr_NoMemory();                                                                      \
		}                                                                                          \
		if (!capsule) {                                                                            \
			made->release(made);                                                                   \
			free(held);                                                                            \
		}                                                                                          \
		return capsule;                                                                            \
	}

CAPSULE(schema, ArrowSchema, ARROW_SCHEMA)
CAPSULE(array, ArrowArray, ARROW_ARRAY)
CAPSULE(stream, ArrowArrayStream, ARROW_STREAM)

/* requested_schema is a wish that may be left alone: whoever has it casts what comes. */
METHOD(batch, __arrow_c_array__, , (OBJECT, requested_schema, Py_None))
{
	PyObject *schemas = NULL, *arrays = NULL, *pair = NULL;
	ArrowSchema schema;
	ArrowArray array;

	(void)requested_schema;
	if (array_make(self, &array) < 0)
		return NULL;
	arrays = array_capsule(&array);
	if (arrays && schema_make(&schema))
		PyErr_NoMemory();
	else if (arrays)
		schemas = schema_capsule(&schema);
	if (schemas)
		pair = PyTuple_Pack(2, schemas, arrays);
	Py_XDECREF(schemas);
	Py_XDECREF(arrays);
	return pair;
}

METHOD(batch, __arrow_c_stream__, , (OBJECT, requested_schema, Py_None))
{
	ArrowArray *array = malloc(sizeof(*array));
	ArrowArrayStream stream = {stream_schema, stream_next, stream_error, stream_release, array};

	(void)requested_schema;
	if (!array)
		return PyErr_NoMemory();
	if (array_make(self, array) < 0) {
		free(array);
		return NULL;
	}
	return stream_capsule(&stream);
}

METHOD(batch, import_arrow, (OBJECT, importer)(OBJECT, schema), )
{
	PyObject *imported;
	ArrowArray array;

	if (array_make(self, &array) < 0)
		return NULL;
	imported = PyObject_CallFunction(importer, "KO", (unsigned long long)(uintptr_t)&array, schema);
	if (array.release) /* it was not moved out */
		array.release(&array);
	return imported;
}

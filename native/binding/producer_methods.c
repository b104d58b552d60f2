/* The methods of _native.Producer for bodies that lie in one buffer. */
#include "types.h"

int source_open(body_source *source, PyObject *data, PyObject *where)
{
	source->where.obj = NULL;
	source->bodies = source->stack;
	source->count = 0;
	if (PyObject_GetBuffer(data, &source->data, PyBUF_SIMPLE) < 0)
		return -1;
	if (where && PyObject_GetBuffer(where, &source->where, PyBUF_SIMPLE) < 0) {
		PyBuffer_Release(&source->data);
		return -1;
	}
	return 0;
}

static void source_close(body_source *source)
{
	if (source->bodies != source->stack)
		PyMem_Free(source->bodies);
	if (source->where.obj)
		PyBuffer_Release(&source->where);
	PyBuffer_Release(&source->data);
}

bool source_room(body_source *source, uint32_t count)
{
	source->bodies = bodies_new(source->stack, count);
	source->count = count;
	return source->bodies != NULL;
}

int source_publish(body_source *source, producer_object *producer, bool good,
                   const shmq_terms *terms, int64_t timeout, uint64_t *first_id)
{
	int r = good ? 0 : -1;

	*first_id = 0;
	if (good && source->count)
		r = producer_put(producer, source->bodies, source->count,
		                 bodies_large(source->bodies, source->count), terms, timeout, first_id);
	source_close(source);
	return r;
}

/* The same with packed properties, as property_blocks_open takes them. Returns the first id. */
static PyObject *source_publish_with(body_source *source, producer_object *producer, bool good,
                                     PyObject *properties, shmq_terms terms, int64_t timeout)
{
	property_blocks packed = {0};
	uint64_t first_id;
	int r;

	good = good && property_blocks_open(&packed, properties, (Py_ssize_t)source->count) == 0;
	terms.properties = packed.blocks;
	r = source_publish(source, producer, good, &terms, timeout, &first_id);
	property_blocks_close(&packed);
	return r < 0 ? NULL : PyLong_FromUnsignedLongLong(first_id);
}

METHOD(producer, publish_fixed, (OBJECT, data)(U32, count)(U64, width),
       (DELAY, defer, 0)(TIMEOUT, timeout, FOR_EVER)(OBJECT, properties, Py_None)(TTL, ttl, 0))
{
	body_source source;
	bool good;

	if (source_open(&source, data, NULL) < 0)
		return NULL;
	good = !count || width <= (uint64_t)source.data.len / count;
	if (!good)
		PyErr_Format(PyExc_ValueError, "publish to '%U': %u bodies of %llu bytes are not in %zd",
		             self->topic, count, (unsigned long long)width, source.data.len);
	else
		good = source_room(&source, count);
	for (uint32_t i = 0; good && i < count; i++)
		source.bodies[i] = (shmq_body){(const char *)source.data.buf + i * width, width};
	return source_publish_with(&source, self, good, properties, terms_after(defer, ttl), timeout);
}

/* ---- Arrow's layout ------------------------------------------------------------------------- */

/* Find the bodies. Returns false with an exception if an offset points outside the data. */
static bool source_offsets(body_source *source, producer_object *self, bool wide, uint64_t start,
                           uint32_t count)
{
	uint64_t known = (uint64_t)source->where.len / (wide ? sizeof(int64_t) : sizeof(int32_t));
	const int64_t *wide_at = source->where.buf;
	const int32_t *at = source->where.buf;
	bool good = start < known && count < known - start;

	if (good && !source_room(source, count))
		return false;
	for (uint32_t i = 0; good && i < count; i++) {
		int64_t from = wide ? wide_at[start + i] : at[start + i];
		int64_t to = wide ? wide_at[start + i + 1] : at[start + i + 1];

		good = from >= 0 && to >= from && to <= source->data.len;
		if (good)
			source->bodies[i] = (shmq_body){(const char *)source->data.buf + from,
			                                (uint64_t)(to - from)};
	}
	if (!good)
		PyErr_Format(PyExc_ValueError, "publish to '%U': the offsets do not fit the data",
		             self->topic);
	return good;
}

/* ---- at most once --------------------------------------------------------------------------- */

/* Returns SHMQ_OK, SHMQ_REPEATED, or CORE_RAISED with an exception. */
static int publish_marked(producer_object *self, const body_source *source, const shmq_terms *terms,
                          const shmq_sequence *mark, int64_t timeout, uint64_t *first_id)
{
	attempt a = {.timeout = timeout};
	int status;

	do {
		if (!producer_usable(self))
			return CORE_RAISED;
		CORE_CALL_SLOWLY(self->broker, status,
		                 shmq_publish_once(self->handle, source->bodies, source->count, terms, mark,
		                                   until, first_id));
		if (status == SHMQ_OK || status == SHMQ_REPEATED)
			return status;
	} while (producer_retry(self, &a, status));
	return CORE_RAISED;
}

/* clang-format off */
METHOD(producer, publish_once,
       (OBJECT, data)(OBJECT, offsets)(BOOL, wide)(U64, start)(U32, count)
       (U64, key0)(U64, key1)(U64, epoch)(U64, after)(U64, upto),
       (TIMEOUT, timeout, FOR_EVER)(OBJECT, properties, Py_None)(TTL, ttl, 0)(U64, whose, 0))
/* clang-format on */
{
	const shmq_sequence mark = {{key0, key1}, epoch, after, upto, whose};
	shmq_terms terms = terms_after(0, ttl);
	property_blocks packed = {0};
	int status = CORE_RAISED;
	body_source source;
	uint64_t first_id;

	if (source_open(&source, data, offsets) < 0)
		return NULL;
	if (source_offsets(&source, self, wide, start, count) &&
	    property_blocks_open(&packed, properties, (Py_ssize_t)source.count) == 0) {
		terms.properties = packed.blocks;
		status = publish_marked(self, &source, &terms, &mark, timeout, &first_id);
	}
	property_blocks_close(&packed);
	source_close(&source);
	if (status == SHMQ_REPEATED)
		Py_RETURN_NONE;
	return status == SHMQ_OK ? PyLong_FromUnsignedLongLong(first_id) : NULL;
}

METHOD(producer, mark, (U64, key0)(U64, key1), )
{
	const uint64_t key[2] = {key0, key1};
	attempt a = {.timeout = FOR_EVER};
	shmq_sequence mark;
	int status;

	do {
		if (!producer_usable(self))
			return NULL;
		CORE_CALL_SLOWLY(self->broker, status, shmq_sequence_read(self->handle, key, until, &mark));
		if (status == SHMQ_OK)
			return Py_BuildValue("(KK)", (unsigned long long)mark.epoch,
			                     (unsigned long long)mark.upto);
	} while (producer_retry(self, &a, status));
	return NULL;
}

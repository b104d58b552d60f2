/*
 * nsqd's TCP protocol for the gateway: the methods of _native.Producer that publish what a client
 * sends, and scan_bodies. wire_window_type.c delivers.
 */
#include "types.h"

METHOD(native, scan_bodies, (OBJECT, data)(U64, start)(U64, end)(U32, count)(U64, max_msg_size), )
{
	shmq_wire_input in = {.max_msg_size = max_msg_size};
	uint64_t used = 0;
	uint32_t whole = 0;
	int status = SHMQ_OK;
	int64_t bad = 0;
	Py_buffer view;
	bool inside;

	(void)self;
	if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	inside = start <= end && end <= (uint64_t)view.len;
	if (inside) {
		in.data = (const char *)view.buf + start;
		in.length = end - start;
		status = shmq_wire_bodies(&in, count, NULL, &whole, &used, &bad);
	}
	PyBuffer_Release(&view);
	if (!inside)
		return PyErr_Format(PyExc_ValueError, "scan_bodies() needs 0 <= start <= end <= len(data)");
	if (status != SHMQ_OK)
		return Py_BuildValue("(KIL)", (unsigned long long)(start + used), whole, (long long)bad);
	return Py_BuildValue("(KIO)", (unsigned long long)(start + used), whole, Py_None);
}

/* The caller has scanned the bytes before. */
METHOD(producer, publish_framed, (OBJECT, data)(U64, start)(U32, count),
       (DELAY, defer, 0)(TIMEOUT, timeout, FOR_EVER))
{
	uint64_t first_id, used = 0;
	uint32_t whole = 0;
	body_source source;
	int64_t bad;
	bool good;

	if (source_open(&source, data, NULL) < 0)
		return NULL;
	good = source_room(&source, count);
	if (good && start <= (uint64_t)source.data.len)
		shmq_wire_bodies(&(shmq_wire_input){.data = (const char *)source.data.buf + start,
		                                    .length = (uint64_t)source.data.len - start,
		                                    .max_msg_size = INT32_MAX},
		                 count, source.bodies, &whole, &used, &bad);
	if (good && whole < count) {
		PyErr_Format(PyExc_ValueError, "publish to '%U': there are %u whole bodies, not %u",
		             self->topic, whole, count);
		good = false;
	}
	if (source_publish(&source, self, good, &(shmq_terms){.due = due_after(defer)}, timeout,
	                   &first_id) < 0)
		return NULL;
	return PyLong_FromUnsignedLongLong(start + used);
}

void wire_run(body_source *source, shmq_wire_input *in, uint64_t *used, uint32_t *answers)
{
	bool batch = in->length && *(const char *)in->data == 'M';

	/* The line is that of an MPUB; that of a PUB is the same without the M. */
	in->line = (const char *)source->where.buf + !batch;
	in->line_length = (uint64_t)source->where.len - !batch;
	source->count = (batch ? shmq_wire_batch : shmq_wire_publishes)(in, BODIES_ON_STACK,
	                                                                source->stack, used);
	*answers = batch && source->count ? 1 : source->count;
}

METHOD(producer, publish_run,
       (OBJECT, data)(U64, start)(U64, end)(OBJECT, line)(U64, max_msg_size)(U64, max_body_size), )
{
	uint32_t answers = 0, count;
	uint64_t first_id, used = 0;
	body_source source;
	bool good;

	if (source_open(&source, data, line) < 0)
		return NULL;
	good = start <= end && end <= (uint64_t)source.data.len && source.where.len;
	if (good)
		wire_run(&source,
		         &(shmq_wire_input){.data = (const char *)source.data.buf + start,
		                            .length = end - start,
		                            .max_msg_size = max_msg_size,
		                            .max_body_size = max_body_size},
		         &used, &answers);
	else
		PyErr_SetString(PyExc_ValueError,
		                "publish_run() needs a line, and 0 <= start <= end <= len(data)");
	count = source.count;
	if (source_publish(&source, self, good, &(shmq_terms){0}, 0, &first_id) < 0)
		return NULL;
	return Py_BuildValue("KII", start + used, count, answers);
}

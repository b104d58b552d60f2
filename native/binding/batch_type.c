/*
 * _native.Batch: deliveries taken together. Their bodies are copied once, into one block in Arrow's
 * layout: count + 1 offsets, then the bytes. The block is a bytes object, so every view keeps it
 * alive. A large block to which nothing refers any more is reused for the consumer's next batch,
 * because the pages of a new one would cost more than the copy.
 */
#include "types.h"

#include <string.h>

#define BLOCK_LARGE ((size_t)16 << 10) /* from this size on a block is reused */
#define BLOCK_SPARED ((size_t)4 << 20) /* and up to this one */
#define BLOCK_SLOW ((size_t)256 << 10) /* from this size on it is filled without the GIL */

/* ---- make ----------------------------------------------------------------------------------- */

static PyObject *block_new(consumer_object *consumer, size_t bytes)
{
	PyObject *spare = consumer->spare;

	if (bytes >= BLOCK_LARGE && spare) {
		consumer->spare = NULL;
		if ((size_t)PyBytes_Size(spare) >= bytes)
			return spare;
		Py_DECREF(spare);
	}
	if (bytes >= BLOCK_LARGE)
		bytes += bytes / 4;
	return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
}

static bool is_ours_alone(PyObject *block)
{
#ifdef Py_GIL_DISABLED
	(void)block; /* its count is in two parts, and a reference may move from one to the other */
	return false;
#else
	return Py_REFCNT(block) == 1;
#endif
}

static void block_free(consumer_object *consumer, PyObject *block)
{
	size_t bytes = block && !consumer->spare ? (size_t)PyBytes_Size(block) : 0;

	if (bytes >= BLOCK_LARGE && bytes <= BLOCK_SPARED && is_ours_alone(block))
		consumer->spare = block;
	else
		Py_XDECREF(block);
}

/* Copy each body, and keep it if the message is still ours after the copy. */
static void batch_fill(batch_object *self, shmq_consumer *consumer, const shmq_message *messages,
                       uint32_t n, int64_t *offsets, char *data)
{
	char *blocks = self->properties ? PyBytes_AsString(self->properties) : NULL;
	uint32_t kept = 0, block_at = 0;
	int64_t at = 0;

	for (uint32_t i = 0; i < n; i++) {
		const shmq_message *m = &messages[i];

		memcpy(data + at, m->body, m->length);
		if (UNLIKELY(blocks != NULL))
			memcpy(blocks + block_at, (const char *)m->body - m->properties, m->properties);
		if (UNLIKELY(!shmq_message_is_ours(consumer, m)))
			continue;
		self->messages[kept] = *m;
		self->messages[kept].body = data + at;
		if (UNLIKELY(blocks != NULL)) {
			self->properties_at[kept] = block_at;
			block_at += m->properties;
		}
		offsets[kept++] = at;
		at += m->length;
	}
	offsets[kept] = at;
	self->count = self->open = kept;
	self->offsets = offsets;
	self->data = data;
}

/* Make room for properties. At most 65536 messages have 4 KiB each. */
static int batch_properties(batch_object *self, uint32_t n, size_t bytes)
{
	self->properties = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
	self->properties_at = PyMem_Malloc(n * sizeof(*self->properties_at));
	if (self->properties && !self->properties_at)
		PyErr_NoMemory();
	return self->properties && self->properties_at ? 0 : -1;
}

static int batch_allocate(batch_object *self, const shmq_message *messages, uint32_t n)
{
	size_t head = (n + 1) * sizeof(int64_t), bytes = 0, properties = 0;
	int64_t *offsets;

	for (uint32_t i = 0; i < n; i++) {
		bytes += messages[i].length;
		properties += messages[i].properties;
	}
	if (UNLIKELY(properties) && batch_properties(self, n, properties) < 0)
		return -1;
	self->messages = PyMem_Malloc(n * (sizeof(shmq_message) + 1));
	self->block = block_new(self->consumer, head + bytes);
	if (!self->messages || !self->block) {
		if (!PyErr_Occurred())
			PyErr_NoMemory();
		return -1;
	}
	self->settled = (uint8_t *)(self->messages + n);
	memset(self->settled, 0, n);
	offsets = (int64_t *)(void *)PyBytes_AsString(self->block);
	if (head + bytes < BLOCK_SLOW) {
		batch_fill(self, self->consumer->handle, messages, n, offsets, (char *)(offsets + n + 1));
	} else {
		broker_object *entered = broker_enter(self->consumer->broker);
		shmq_consumer *handle = self->consumer->handle;

		Py_BEGIN_ALLOW_THREADS
		batch_fill(self, handle, messages, n, offsets, (char *)(offsets + n + 1));
		Py_END_ALLOW_THREADS
		broker_leave(entered);
	}
	return 0;
}

PyObject *batch_new(consumer_object *consumer, const shmq_message *messages, uint32_t n)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(consumer->batch_type, Py_tp_alloc);
	batch_object *self = (batch_object *)alloc(consumer->batch_type, 0);

	if (!self)
		return NULL;
	self->consumer = (consumer_object *)Py_NewRef((PyObject *)consumer);
	self->epoch = consumer->epoch;
	if (n && (batch_allocate(self, messages, n) < 0 || self->count == 0)) {
		Py_DECREF((PyObject *)self);
		return NULL;
	}
	return (PyObject *)self;
}

PyObject *batch_empty(PyTypeObject *type)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);

	return alloc(type, 0);
}

static DEALLOC(batch)
{
	PyMem_Free(self->messages);
	PyMem_Free(self->properties_at);
	Py_XDECREF(self->properties);
	if (self->consumer)
		block_free(self->consumer, self->block);
	else
		Py_XDECREF(self->block);
	Py_XDECREF((PyObject *)self->consumer);
	object_free((PyObject *)self);
}

/* ---- read ----------------------------------------------------------------------------------- */

static Py_ssize_t batch_length(batch_object *self)
{
	return (Py_ssize_t)self->count;
}

static PyObject *message_of_batch(batch_object *batch, uint32_t index)
{
	message_object *self = PyObject_New(message_object, batch->consumer->state->message);

	if (!self)
		return NULL;
	self->consumer = (consumer_object *)Py_NewRef((PyObject *)batch->consumer);
	self->batch = (batch_object *)Py_NewRef((PyObject *)batch);
	self->body = NULL;
	self->properties = NULL;
	self->message = batch->messages[index];
	self->epoch = batch->epoch;
	self->index = index;
	self->exports = 0;
	self->pinned = self->settled = false;
	return (PyObject *)self;
}

static PyObject *batch_item(batch_object *self, Py_ssize_t index)
{
	if (index < 0 || index >= (Py_ssize_t)self->count) {
		PyErr_SetString(PyExc_IndexError, "batch index out of range");
		return NULL;
	}
	return message_of_batch(self, (uint32_t)index);
}

static PyObject *batch_iter(PyObject *self)
{
	return PySeqIter_New(self);
}

static NOARGS_METHOD(batch, bodies)
{
	PyObject *list = PyList_New((Py_ssize_t)self->count);

	for (uint32_t i = 0; list && i < self->count; i++) {
		const shmq_message *m = &self->messages[i];
		PyObject *body = PyBytes_FromStringAndSize(m->body, (Py_ssize_t)m->length);

		if (!body || PyList_SetItem(list, (Py_ssize_t)i, body) < 0)
			Py_CLEAR(list);
	}
	return list;
}

static NOARGS_METHOD(batch, blocks)
{
	PyObject *list = PyList_New((Py_ssize_t)self->count);

	for (uint32_t i = 0; list && i < self->count; i++) {
		uint32_t length = self->messages[i].properties;
		const char *from = self->properties
		                           ? PyBytes_AsString(self->properties) + self->properties_at[i]
		                           : "";
		PyObject *block = PyBytes_FromStringAndSize(from, (Py_ssize_t)length);

		if (!block || PyList_SetItem(list, (Py_ssize_t)i, block) < 0)
			Py_CLEAR(list);
	}
	return list;
}

/* memoryview(bytes)[from:to].cast(format), without the steps that change nothing */
static PyObject *view_of(PyObject *bytes, Py_ssize_t from, Py_ssize_t to, const char *format)
{
	PyObject *view = PyMemoryView_FromObject(bytes), *before;

	if (view && (from || to < PyBytes_Size(bytes))) {
		before = view;
		view = PySequence_GetSlice(before, from, to);
		Py_DECREF(before);
	}
	if (view && *format != 'B') {
		before = view;
		view = PyObject_CallMethod(before, "cast", "s", format);
		Py_DECREF(before);
	}
	return view;
}

/* Gather one field of all messages. */
static PyObject *gathered(batch_object *self, const char *format, size_t size, size_t offset)
{
	PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(self->count * size));
	PyObject *view = NULL;
	char *to;

	if (!bytes)
		return NULL;
	to = PyBytes_AsString(bytes);
	for (uint32_t i = 0; i < self->count; i++)
		memcpy(to + i * size, (const char *)&self->messages[i] + offset, size);
	view = view_of(bytes, 0, (Py_ssize_t)(self->count * size), format);
	Py_DECREF(bytes);
	return view;
}

PyObject *batch_block(batch_object *self)
{
	static const int64_t none = 0;

	if (!self->block) { /* an empty batch has one offset and no data */
		self->block = PyBytes_FromStringAndSize((const char *)&none, sizeof(none));
		if (self->block) {
			self->offsets = (const int64_t *)(const void *)PyBytes_AsString(self->block);
			self->data = (const char *)(self->offsets + 1);
		}
	}
	return self->block;
}

static ARGUMENT_METHOD(batch, column, name)
{
	PyObject *block;
	Py_ssize_t data_at;

	if (!PyUnicode_Check(name))
		return PyErr_Format(PyExc_TypeError, "column() needs a str, not %R", name);
	if (PyUnicode_CompareWithASCIIString(name, "ids") == 0)
		return gathered(self, "Q", 8, offsetof(shmq_message, id));
	if (PyUnicode_CompareWithASCIIString(name, "timestamps") == 0)
		return gathered(self, "q", 8, offsetof(shmq_message, timestamp));
	if (PyUnicode_CompareWithASCIIString(name, "attempts") == 0) /* its low half: little endian */
		return gathered(self, "H", 2, offsetof(shmq_message, attempts));
	block = batch_block(self);
	if (!block)
		return NULL;
	data_at = self->data - (const char *)self->offsets;
	if (PyUnicode_CompareWithASCIIString(name, "offsets") == 0)
		return view_of(block, 0, (Py_ssize_t)(self->count + 1) * 8, "q");
	if (PyUnicode_CompareWithASCIIString(name, "data") == 0)
		return view_of(block, data_at, data_at + (Py_ssize_t)self->offsets[self->count], "B");
	return PyErr_Format(PyExc_ValueError,
	                    "no column %R; there are ids, timestamps, attempts, offsets, data", name);
}

/* ---- settle --------------------------------------------------------------------------------- */

void batch_settled(batch_object *self, uint32_t index)
{
	if (!self->settled[index]) {
		self->settled[index] = 1;
		self->open--;
	}
}

/* The messages that are not settled: all of them in place, or a copy with the index of each. */
static const shmq_message *batch_open(batch_object *self, shmq_message **copy, uint32_t **index)
{
	uint32_t n = 0;

	*copy = NULL;
	*index = NULL;
	if (self->open == self->count)
		return self->messages;
	*copy = PyMem_Malloc(self->open * (sizeof(shmq_message) + sizeof(uint32_t)) + 1);
	if (!*copy) {
		PyErr_NoMemory();
		return NULL;
	}
	*index = (uint32_t *)(*copy + self->open);
	for (uint32_t i = 0; i < self->count; i++) {
		if (!self->settled[i]) {
			(*copy)[n] = self->messages[i];
			(*index)[n++] = i;
		}
	}
	return *copy;
}

/* Settle all open messages in one core call. Those that are no longer in flight count as settled,
 * and the exception names them. */
static int batch_settle(batch_object *self, enum settle what, int64_t delay, PyObject *error)
{
	uint32_t n = self->open, lost = 0, *index;
	const shmq_message *messages;
	shmq_message *copy;
	uint64_t first = 0;
	uint8_t *ok;
	int status, buried = 0;

	if (!n)
		return 0;
	messages = batch_open(self, &copy, &index);
	if (!messages)
		return -1;
	ok = PyMem_Calloc(n, 1);
	if (!ok) {
		PyMem_Free(copy);
		PyErr_NoMemory();
		return -1;
	}
	status = consumer_settle(self->consumer, self->epoch, what, messages, n, delay, ok);
	if (status == SHMQ_OK && what != SETTLE_TOUCH && !index) {
		memset(self->settled, 1, self->count);
		self->open = 0;
	} else if (status == SHMQ_OK || status == SHMQ_NOT_IN_FLIGHT) {
		for (uint32_t i = 0; i < n; i++) {
			bool done = status == SHMQ_OK || ok[i];

			if (!done && !lost++)
				first = messages[i].id;
			if (!done || what != SETTLE_TOUCH)
				batch_settled(self, index ? index[i] : i);
		}
	}
	if (what == SETTLE_REJECT && lost < n && (status == SHMQ_OK || status == SHMQ_NOT_IN_FLIGHT))
		buried = settle_bury(self->consumer, messages, n, error);
	PyMem_Free(copy);
	PyMem_Free(ok);
	if (buried < 0)
		return -1;
	if (status != SHMQ_OK)
		settle_raise(self->consumer, status, what, self->epoch, n, lost, first);
	return status == SHMQ_OK ? 0 : -1;
}

static NOARGS_METHOD(batch, finish)
{
	return batch_settle(self, SETTLE_FINISH, 0, NULL) < 0 ? NULL : Py_NewRef(Py_None);
}

static METHOD(batch, requeue, , (DELAY_OR_NONE, delay, BY_POLICY)(BOOL, failed, true))
{
	enum settle what = settle_of_requeue(&delay, failed);

	return batch_settle(self, what, delay, NULL) < 0 ? NULL : Py_NewRef(Py_None);
}

static METHOD(batch, reject, , (OBJECT, error, Py_None))
{
	if (!error_is_text(error))
		return NULL;
	return batch_settle(self, SETTLE_REJECT, BURY_NS, error) < 0 ? NULL : Py_NewRef(Py_None);
}

static NOARGS_METHOD(batch, touch)
{
	return batch_settle(self, SETTLE_TOUCH, 0, NULL) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *batch___enter__(PyObject *self, PyObject *Py_UNUSED(unused))
{
	return Py_NewRef(self);
}

/* finish(), or requeue() after an error; a failure of that requeue does not hide the error. */
static EXIT_METHOD(batch)
{
	if (nargs == 0 || args[0] == Py_None)
		return batch_settle(self, SETTLE_FINISH, 0, NULL) < 0 ? NULL : Py_NewRef(Py_None);
	if (batch_settle(self, SETTLE_RETRY, 0, NULL) < 0) {
		if (!PyErr_ExceptionMatches(self->consumer->state->error))
			return NULL;
		PyErr_Clear();
	}
	Py_RETURN_NONE;
}

static PyObject *batch_topic(batch_object *self, void *Py_UNUSED(unused))
{
	return Py_NewRef(self->consumer ? self->consumer->topic : Py_None);
}

static PyGetSetDef batch_getters[] = {
	GETTER_ROW(batch, Batch, topic),
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef batch_methods[] = {
	METHOD_ROW(batch, Batch, bodies, METH_NOARGS),
	METHOD_ROW(batch, Batch, blocks, METH_NOARGS),
	METHOD_ROW(batch, Batch, column, METH_O),
	METHOD_ROW(batch, Batch, finish, METH_NOARGS),
	METHOD_ROW(batch, Batch, requeue, FAST),
	METHOD_ROW(batch, Batch, reject, FAST),
	METHOD_ROW(batch, Batch, touch, METH_NOARGS),
	METHOD_ROW(batch, Batch, __arrow_c_array__, FAST),
	METHOD_ROW(batch, Batch, __arrow_c_stream__, FAST),
	METHOD_ROW(batch, Batch, import_arrow, FAST),
	METHOD_ROW(batch, Batch, __enter__, METH_NOARGS),
	METHOD_ROW(batch, Batch, __exit__, METH_FASTCALL),
	{NULL, NULL, 0, NULL},
};

static PyType_Slot batch_slots[] = {
	{Py_tp_doc, DOC_Batch},        {Py_tp_dealloc, batch_dealloc},
	{Py_tp_iter, batch_iter},      {Py_sq_length, batch_length},
	{Py_sq_item, batch_item},      {Py_tp_methods, batch_methods},
	{Py_tp_getset, batch_getters}, {0, NULL},
};

TYPE_SPEC(batch, Batch, Py_TPFLAGS_BASETYPE);

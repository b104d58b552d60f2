/*
 * _native.Window: the deliveries of one connection of nsqd's TCP protocol. It writes frames and
 * reads runs of FIN lines, many at a time. A client names a message by its id. wire_methods.c
 * publishes what a client sends.
 */
#include "types.h"

#include <string.h>

#define TAKE_MOST 4096u
#define TAKE_ON_STACK 64u
#define FINISH_MOST 1024u

/* ---- take ----------------------------------------------------------------------------------- */

static bool window_usable(window_object *self)
{
	return init_called(self->handle != NULL, "Window") && consumer_usable(self->consumer);
}

/* A random number below 100, by xorshift64*: it chooses the messages of a sample. */
static uint32_t percent(window_object *self)
{
	self->random ^= self->random >> 12;
	self->random ^= self->random << 25;
	self->random ^= self->random >> 27;
	return (uint32_t)((self->random * UINT64_C(0x2545f4914f6cdd1d) >> 33) % 100);
}

/* nsqd's rule: `rate` + 1 of a hundred messages are delivered, and the others are dropped. Moves
 * those to drop to the end. Returns how many stay. */
static uint32_t sampled(window_object *self, shmq_message *messages, uint32_t n, uint32_t rate)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < n; i++) {
		if (percent(self) <= rate) {
			shmq_message m = messages[i];

			messages[i] = messages[kept];
			messages[kept++] = m;
		}
	}
	return kept;
}

/* Copy each message into its frame; leave out those that were lost meanwhile. */
static uint64_t frames_write(window_object *self, const shmq_message *messages, uint32_t n,
                             uint8_t *to, uint32_t *count)
{
	uint64_t at = 0;

	*count = 0;
	for (uint32_t i = 0; i < n; i++) {
		uint64_t bytes = shmq_wire_frame(&messages[i], to + at);

		if (UNLIKELY(!shmq_message_is_ours(self->consumer->handle, &messages[i])))
			continue;
		shmq_window_add(self->handle, &messages[i]);
		at += bytes;
		++*count;
	}
	return at;
}

static PyObject *frames_of(window_object *self, const shmq_message *messages, uint32_t n)
{
	uint64_t bytes = 0, used;
	uint32_t count;
	PyObject *frames, *pair;
	int status = shmq_window_reserve(self->handle, self->consumer->handle, n);

	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "deliver %u messages", n);
	for (uint32_t i = 0; i < n; i++)
		bytes += SHMQ_WIRE_FRAME + messages[i].length;
	frames = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
	if (!frames)
		return NULL;
	used = frames_write(self, messages, n, (uint8_t *)PyBytes_AsString(frames), &count);
	if (UNLIKELY(used != bytes)) {
		PyObject *shorter = PyBytes_FromStringAndSize(PyBytes_AsString(frames), (Py_ssize_t)used);

		Py_DECREF(frames);
		frames = shorter;
	}
	if (!frames)
		return NULL;
	pair = Py_BuildValue("(NI)", frames, count);
	if (!pair)
		Py_DECREF(frames);
	return pair;
}

/* Give messages back if one of them is sealed: it belongs to a pool or a queue, and its pickle may
 * hold anything, so it does not leave the host. Returns false with an exception then. */
static bool may_leave(window_object *self, const shmq_message *messages, uint32_t got)
{
	consumer_object *consumer = self->consumer;
	bool sealed = false;
	int status;

	for (uint32_t i = 0; i < got; i++)
		sealed |= messages[i].sealed;
	if (LIKELY(!sealed))
		return true;
	CORE_CALL(consumer->broker, status,
	          shmq_release(consumer->handle, messages, got, 0, NULL, until));
	if (status != CORE_RAISED)
		raise_status(self->state, SHMQ_NOT_SEALED, "a client of a network may not read it",
		             "take from '%U/%U'", consumer->topic, consumer->channel);
	return false;
}

static METHOD(window, take, (U32, n)(U64, max_bytes), (U32, sample_rate, 0))
{
	shmq_message stack[TAKE_ON_STACK], *messages = stack;
	PyObject *result = NULL;
	uint32_t got = 0, kept;
	attempt a = {0};
	int status;

	if (n > TAKE_MOST)
		n = TAKE_MOST;
	if (n > TAKE_ON_STACK)
		messages = PyMem_Malloc(n * sizeof(*messages));
	if (!messages)
		return PyErr_NoMemory();
	for (;;) {
		if (!window_usable(self))
			goto out;
		CORE_CALL(self->consumer->broker, status,
		          shmq_take_bytes(self->consumer->handle, messages, n, max_bytes, until, &got));
		if (status != SHMQ_NEED_MAP || !broker_map_missing(self->consumer->broker, &a))
			break;
	}
	if (status == SHMQ_EMPTY) {
		result = Py_NewRef(Py_None);
	} else if (status != SHMQ_OK) {
		if (!PyErr_Occurred())
			raise_status(self->state, status, NULL, "take from '%U/%U'", self->consumer->topic,
			             self->consumer->channel);
	} else if (may_leave(self, messages, got)) {
		kept = sample_rate ? sampled(self, messages, got, sample_rate) : got;
		if (kept < got)
			CORE_CALL(
					self->consumer->broker, status,
					shmq_finish(self->consumer->handle, messages + kept, got - kept, NULL, until));
		if (status != CORE_RAISED)
			result = frames_of(self, messages, kept);
	}
out:
	if (messages != stack)
		PyMem_Free(messages);
	return result;
}

/* ---- finish, requeue, touch ----------------------------------------------------------------- */

static int failed_add(PyObject **failed, const uint8_t *id)
{
	PyObject *text = PyBytes_FromStringAndSize((const char *)id, SHMQ_WIRE_ID);
	int r = -1;

	if (text && !*failed)
		*failed = PyList_New(0);
	if (text && *failed)
		r = PyList_Append(*failed, text);
	Py_XDECREF(text);
	return r;
}

/* Finish a run of up to FINISH_MOST lines at `from`. Returns how many messages were, or -1. */
static int64_t finish_some(window_object *self, const uint8_t *from, uint64_t length,
                           uint64_t *used, PyObject **failed)
{
	uint64_t ids[FINISH_MOST];
	shmq_message messages[FINISH_MOST];
	uint32_t of[FINISH_MOST], found = 0, done = 0, n;
	uint8_t ok[FINISH_MOST];
	int status = SHMQ_OK;

	n = shmq_wire_finishes(from, length, ids, FINISH_MOST, used);
	for (uint32_t i = 0; i < n; i++) {
		if (shmq_window_remove(self->handle, ids[i], &messages[found]))
			of[found++] = i;
	}
	if (found) {
		status = consumer_settle(self->consumer, self->consumer->epoch, SETTLE_FINISH, messages,
		                         found, 0, ok);
		if (status != SHMQ_OK && status != SHMQ_NOT_IN_FLIGHT) {
			settle_raise(self->consumer, status, SETTLE_FINISH, self->consumer->epoch, found, 0,
			             messages[0].id);
			return -1;
		}
		if (LIKELY(status == SHMQ_OK && found == n))
			return n;
	}
	for (uint32_t i = 0, k = 0; i < n && done < n; i++) {
		if (k < found && of[k] == i && ok[k++])
			done++;
		else if (failed_add(failed, from + i * SHMQ_WIRE_FIN + 4) < 0)
			return -1;
	}
	return done;
}

static METHOD(window, finish_run, (OBJECT, data)(U64, start)(U64, end), )
{
	PyObject *failed = NULL, *result = NULL;
	int64_t total = 0, some;
	Py_buffer view;
	uint64_t used;

	if (!window_usable(self) || PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (start > end || end > (uint64_t)view.len) {
		PyErr_SetString(PyExc_ValueError, "finish_run() needs 0 <= start <= end <= len(data)");
		goto out;
	}
	do {
		some = finish_some(self, (const uint8_t *)view.buf + start, end - start, &used, &failed);
		if (some < 0)
			goto out;
		total += some;
		start += used;
	} while (used == FINISH_MOST * (uint64_t)SHMQ_WIRE_FIN);
	result = Py_BuildValue("(KLO)", (unsigned long long)start, (long long)total,
	                       failed ? failed : Py_None);
out:
	Py_XDECREF(failed);
	PyBuffer_Release(&view);
	return result;
}

/* The delivery with the id in `text`. Returns 1; 0: there is none; -1: an exception is set. */
static int delivery_of(window_object *self, PyObject *text, bool remove, shmq_message *m)
{
	Py_ssize_t length;
	char *data;
	uint64_t id;

	if (!window_usable(self) || PyBytes_AsStringAndSize(text, &data, &length) < 0)
		return -1;
	if (length != SHMQ_WIRE_ID || !shmq_wire_id(data, &id))
		return 0;
	return remove ? shmq_window_remove(self->handle, id, m) : shmq_window_find(self->handle, id, m);
}

static PyObject *settle_one(window_object *self, PyObject *text, enum settle what, int64_t delay)
{
	shmq_message m;
	uint8_t ok = 0;
	int status, found = delivery_of(self, text, what != SETTLE_TOUCH, &m);

	if (found < 0)
		return NULL;
	if (!found)
		Py_RETURN_FALSE;
	status = consumer_settle(self->consumer, self->consumer->epoch, what, &m, 1, delay, &ok);
	if (status != SHMQ_OK && status != SHMQ_NOT_IN_FLIGHT)
		return settle_raise(self->consumer, status, what, self->consumer->epoch, 1, 0, m.id);
	return PyBool_FromLong(status == SHMQ_OK);
}

static ARGUMENT_METHOD(window, finish, text)
{
	return settle_one(self, text, SETTLE_FINISH, 0);
}

static ARGUMENT_METHOD(window, touch, text)
{
	return settle_one(self, text, SETTLE_TOUCH, 0);
}

static METHOD(window, requeue, (OBJECT, id)(I64, delay_ns), )
{
	return settle_one(self, id, SETTLE_REQUEUE, delay_ns);
}

/* ---- life ----------------------------------------------------------------------------------- */

static INIT(window)
{
	static char *names[] = {"consumer", NULL};
	consumer_object *consumer;
	int status;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Window", names, self->state->consumer,
	                                 &consumer))
		return -1;
	if (!init_first(self->handle != NULL, "Window"))
		return -1;
	if (!consumer_usable(consumer))
		return -1;
	status = shmq_window_open(&self->handle);
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "deliver messages");
		return -1;
	}
	self->consumer = (consumer_object *)Py_NewRef((PyObject *)consumer);
	self->random = (uint64_t)shmq_now() | 1;
	return 0;
}

static DEALLOC(window)
{
	if (self->handle) {
		shmq_window_free(self->handle);
		Py_DECREF((PyObject *)self->consumer);
	}
	object_free((PyObject *)self);
}

static PyMethodDef window_methods[] = {
	METHOD_ROW(window, Window, take, FAST),     METHOD_ROW(window, Window, finish_run, FAST),
	METHOD_ROW(window, Window, finish, METH_O), METHOD_ROW(window, Window, requeue, FAST),
	METHOD_ROW(window, Window, touch, METH_O),  {NULL, NULL, 0, NULL},
};

static PyType_Slot window_slots[] = {
	{Py_tp_doc, DOC_Window},         {Py_tp_new, type_new},           {Py_tp_init, window_init},
	{Py_tp_dealloc, window_dealloc}, {Py_tp_methods, window_methods}, {0, NULL},
};

TYPE_SPEC(window, Window, 0);

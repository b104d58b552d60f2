/*
 * _native.Message: one delivery.
 *
 * The place of its body:
 *   taken singly, small   `body`, a copy that was made when it was taken
 *   taken singly, large   shared memory, until it is asked for; the copy is good if the message is
 *                         still in flight to us after it was made
 *   in a batch            the batch's block
 *   while it is viewed    shared memory, pinned, as long as a buffer lives
 *
 * Messages refer to their consumer and batch, and never the other way round, so there is no cycle
 * and no need for GC.
 */
#include "types.h"

/* Copy what must be safe before the message is finished: its properties, and a body that is not
 * long. Returns false if the message was lost before that, or with an exception. */
static bool message_copied(consumer_object *consumer, const shmq_message *m, PyObject **body,
                           PyObject **properties)
{
	*body = *properties = NULL;
	if (LIKELY(m->length <= BODY_COPIED)) {
		*body = PyBytes_FromStringAndSize(m->body, (Py_ssize_t)m->length);
		if (UNLIKELY(!*body))
			return false;
	}
	if (UNLIKELY(m->properties)) {
		*properties = PyBytes_FromStringAndSize((const char *)m->body - m->properties,
		                                        (Py_ssize_t)m->properties);
		if (!*properties) {
			Py_CLEAR(*body);
			return false;
		}
	}
	if (UNLIKELY((*body || *properties) && !shmq_message_is_ours(consumer->handle, m))) {
		Py_CLEAR(*body);
		Py_CLEAR(*properties);
		return false;
	}
	return true;
}

PyObject *message_new(consumer_object *consumer, const shmq_message *m)
{
	PyObject *body, *properties;
	message_object *self;

	if (UNLIKELY(!message_copied(consumer, m, &body, &properties)))
		return NULL;
	self = PyObject_New(message_object, consumer->state->message);
	if (UNLIKELY(!self)) {
		Py_XDECREF(body);
		Py_XDECREF(properties);
		return NULL;
	}
	Py_INCREF((PyObject *)consumer);
	self->consumer = consumer;
	self->batch = NULL;
	self->body = body;
	self->properties = properties;
	self->message = *m;
	self->epoch = consumer->epoch;
	self->exports = 0;
	self->pinned = self->settled = false;
	return (PyObject *)self;
}

static void message_unpin(message_object *self)
{
	self->pinned = false;
	if (self->epoch == self->consumer->epoch)
		self->consumer->pinned--;
	consumer_unpin(self->consumer, &self->message, self->epoch);
}

static DEALLOC(message)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	if (UNLIKELY(self->pinned))
		message_unpin(self);
	Py_XDECREF(self->body);
	Py_XDECREF(self->properties);
	Py_XDECREF((PyObject *)self->batch);
	Py_DECREF((PyObject *)self->consumer);
	PyObject_Free(self);
	Py_DECREF((PyObject *)type);
}

/* ---- body and view -------------------------------------------------------------------------- */

static PyObject *lost(message_object *self, const char *tried)
{
	consumer_object *consumer = self->consumer;
	char id[17] = "";

	id_hex(self->message.id, id);
	return raise_status(consumer->state, SHMQ_NOT_IN_FLIGHT,
	                    "it timed out or was settled before its body, longer than 4096 bytes, was "
	                    "read; read msg.body or hold msg.view first",
	                    "%s message %s of '%U/%U'", tried, id, consumer->topic, consumer->channel);
}

/* Returns true if its memory is still its own. */
static bool readable(message_object *self)
{
	consumer_object *consumer = self->consumer;

	return self->batch || self->pinned ||
	       (self->epoch == consumer->epoch && !consumer->closed && !consumer->broker->closed &&
	        shmq_message_is_ours(consumer->handle, &self->message));
}

/* Returns the body as bytes, a borrowed reference. */
static PyObject *message_bytes(message_object *self)
{
	PyObject *body;

	if (LIKELY(self->body != NULL))
		return self->body;
	if (!readable(self)) /* before the copy too: its pages may be gone by now */
		return lost(self, "read");
	body = PyBytes_FromStringAndSize(self->message.body, (Py_ssize_t)self->message.length);
	if (body && !readable(self)) {
		Py_DECREF(body);
		return lost(self, "read");
	}
	self->body = body;
	return body;
}

static GETTER(message, body)
{
	PyObject *body = message_bytes(self);

	return body ? Py_NewRef(body) : NULL;
}

/* Returns 0: pinned; 1: it cannot be pinned, use a copy; -1: an exception is set. */
static int message_pin(message_object *self)
{
	consumer_object *consumer = self->consumer;
	int status;

	if (self->pinned)
		return 0;
	if (self->epoch != consumer->epoch || consumer->closed || consumer->broker->closed)
		return 1;
	CORE_CALL(consumer->broker, status, shmq_pin(consumer->handle, &self->message, until));
	if (status == CORE_RAISED)
		return -1;
	if (status != SHMQ_OK)
		return 1;
	if (self->pinned) { /* another thread was faster */
		consumer_unpin(consumer, &self->message, self->epoch);
		return 0;
	}
	consumer->pinned++;
	self->pinned = true;
	return 0;
}

static GETBUFFER(message)
{
	int r = self->batch ? 0 : message_pin(self);

	view->obj = NULL;
	if (r == 0) {
		self->exports++;
		r = PyBuffer_FillInfo(view, (PyObject *)self, (void *)self->message.body,
		                      (Py_ssize_t)self->message.length, 1, flags);
		if (r < 0 && --self->exports == 0 && self->pinned)
			message_unpin(self);
	} else if (r > 0) {
		PyObject *body = message_bytes(self);

		r = body ? PyObject_GetBuffer(body, view, flags) : -1;
	}
	return r;
}

static RELEASEBUFFER(message)
{
	(void)view;
	if (--self->exports == 0 && self->pinned)
		message_unpin(self);
}

static PyObject *message_view(message_object *self, void *Py_UNUSED(unused))
{
	return PyMemoryView_FromObject((PyObject *)self);
}

/* ---- settle --------------------------------------------------------------------------------- */

void message_settled(message_object *self)
{
	self->settled = true;
	if (self->batch)
		batch_settled(self->batch, self->index);
}

static PyObject *settled(message_object *self, enum settle what, int64_t delay)
{
	int status = consumer_settle(self->consumer, self->epoch, what, &self->message, 1, delay, NULL);

	if (what != SETTLE_TOUCH || UNLIKELY(status != SHMQ_OK)) {
		if (LIKELY(status == SHMQ_OK || status == SHMQ_NOT_IN_FLIGHT))
			message_settled(self);
	}
	if (LIKELY(status == SHMQ_OK))
		Py_RETURN_NONE;
	return settle_raise(self->consumer, status, what, self->epoch, 1, 1, self->message.id);
}

static NOARGS_METHOD(message, finish)
{
	return settled(self, SETTLE_FINISH, 0);
}

static METHOD(message, requeue, , (DELAY_OR_NONE, delay, BY_POLICY)(BOOL, failed, true))
{
	return settled(self, settle_of_requeue(&delay, failed), delay);
}

static METHOD(message, reject, , (OBJECT, error, Py_None))
{
	PyObject *result;

	if (!error_is_text(error))
		return NULL;
	result = settled(self, SETTLE_REJECT, BURY_NS);
	if (result && settle_bury(self->consumer, &self->message, 1, error) < 0)
		Py_CLEAR(result);
	return result;
}

static NOARGS_METHOD(message, touch)
{
	return settled(self, SETTLE_TOUCH, 0);
}

static PyObject *message___enter__(PyObject *self, PyObject *Py_UNUSED(unused))
{
	return Py_NewRef(self);
}

/* finish(), or requeue() after an error; a failure of that requeue does not hide the error. Does
 * nothing if the message was settled in the block. */
static EXIT_METHOD(message)
{
	bool failed = nargs > 0 && args[0] != Py_None;
	PyObject *result;

	if (self->batch ? self->batch->settled[self->index] : self->settled)
		Py_RETURN_NONE;
	result = settled(self, failed ? SETTLE_RETRY : SETTLE_FINISH, 0);
	if (result || !failed || !PyErr_ExceptionMatches(self->consumer->state->error))
		return result;
	PyErr_Clear();
	Py_RETURN_NONE;
}

static PyObject *message___reduce__(PyObject *self, PyObject *unused)
{
	(void)self, (void)unused;
	return PyErr_Format(PyExc_TypeError,
	                    "a Message cannot be pickled: only the process that took it can finish it; "
	                    "send its body (and its id) and finish it here");
}

/* ---- the rest ------------------------------------------------------------------------------- */

static PyObject *message_id(message_object *self, void *Py_UNUSED(unused))
{
	return id_str(self->message.id);
}

static PyObject *message_topic(message_object *self, void *Py_UNUSED(unused))
{
	return Py_NewRef(self->consumer->topic);
}

static PyObject *message_timestamp(message_object *self, void *Py_UNUSED(unused))
{
	return PyLong_FromLongLong(self->message.timestamp);
}

static PyObject *message_attempts(message_object *self, void *Py_UNUSED(unused))
{
	return PyLong_FromUnsignedLong(self->message.attempts);
}

static GETTER(message, properties)
{
	if (!self->properties || PyBytes_CheckExact(self->properties)) {
		batch_object *batch = self->batch;
		const char *block = "";
		PyObject *mapping, *old;

		if (self->properties)
			block = PyBytes_AsString(self->properties);
		else if (batch && batch->properties)
			block = PyBytes_AsString(batch->properties) + batch->properties_at[self->index];
		mapping = properties_unpack(self->consumer->state, block, self->message.properties);
		if (!mapping)
			return NULL;
		old = self->properties;
		self->properties = mapping;
		Py_XDECREF(old);
	}
	return Py_NewRef(self->properties);
}

static PyObject *message_sealed(message_object *self, void *Py_UNUSED(unused))
{
	return PyBool_FromLong(self->message.sealed);
}

static Py_ssize_t message_length(message_object *self)
{
	return (Py_ssize_t)self->message.length;
}

static PyObject *message_repr(message_object *self)
{
	char id[17] = "";

	id_hex(self->message.id, id);
	return PyUnicode_FromFormat("<Message %s of '%U/%U': %u bytes, attempt %u>", id,
	                            self->consumer->topic, self->consumer->channel,
	                            self->message.length, self->message.attempts);
}

/* The package knows where replies go. */
static METHOD(message, reply, (OBJECT, body), )
{
	module_state *state = self->consumer->state;

	if (!state->reply) {
		PyObject *module = PyImport_ImportModule("shmq.client.requests");

		if (!module)
			return NULL;
		state->reply = PyObject_GetAttrString(module, "reply");
		Py_DECREF(module);
		if (!state->reply)
			return NULL;
	}
	return PyObject_CallFunctionObjArgs(state->reply, (PyObject *)self->consumer, (PyObject *)self,
	                                    body, NULL);
}

static PyMethodDef message_methods[] = {
	METHOD_ROW(message, Message, finish, METH_NOARGS),
	METHOD_ROW(message, Message, requeue, FAST),
	METHOD_ROW(message, Message, reject, FAST),
	METHOD_ROW(message, Message, touch, METH_NOARGS),
	METHOD_ROW(message, Message, reply, FAST),
	METHOD_ROW(message, Message, __enter__, METH_NOARGS),
	METHOD_ROW(message, Message, __exit__, METH_FASTCALL),
	METHOD_ROW(message, Message, __reduce__, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef message_getters[] = {
	GETTER_ROW(message, Message, id),       GETTER_ROW(message, Message, body),
	GETTER_ROW(message, Message, view),     GETTER_ROW(message, Message, timestamp),
	GETTER_ROW(message, Message, attempts), GETTER_ROW(message, Message, properties),
	GETTER_ROW(message, Message, sealed),   GETTER_ROW(message, Message, topic),
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot message_slots[] = {
	{Py_tp_doc, DOC_Message},
	{Py_tp_dealloc, message_dealloc},
	{Py_tp_repr, message_repr},
	{Py_sq_length, message_length},
	{Py_tp_methods, message_methods},
	{Py_tp_getset, message_getters},
	{Py_bf_getbuffer, message_getbuffer},
	{Py_bf_releasebuffer, message_releasebuffer},
	{0, NULL},
};

TYPE_SPEC(message, Message, Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE);

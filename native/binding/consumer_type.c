/* _native.Consumer: takes from one channel. take() and finish() are the hot path of consumers. */
#include "types.h"

#define TAKE_MOST 65536u

/* ---- try again ------------------------------------------------------------------------------ */

bool consumer_usable(consumer_object *self)
{
	if (LIKELY(self->handle && !self->closed && !self->broker->closed)) {
		if (UNLIKELY(self->pending != NULL))
			unpin_pending(self);
		return true;
	}
	if (init_called(self->handle != NULL, "Consumer"))
		raise_status(self->state, SHMQ_CLOSED, NULL, "take from '%U/%U'", self->topic,
		             self->channel);
	return false;
}

static int consumer_open(consumer_object *self, broker_object *broker, uint32_t queue,
                         uint64_t serial, shmq_consumer **handle)
{
	int status;

	BROKER_CALL(broker, status,
	            shmq_consumer_open(broker->handle, queue, serial, self->max_in_flight,
	                               self->msg_timeout, until, handle));
	return status;
}

/* In a forked child: drop the parent's handle and open one of our own. */
static bool consumer_reopen(consumer_object *self)
{
	broker_object *broker;
	uint64_t queue, serial;
	uint32_t epoch = self->epoch;
	shmq_consumer *handle;
	int status;

	if (forked_call(self->state, self->on_forked, &broker, &queue, &serial) < 0)
		return false;
	status = epoch == self->epoch ? consumer_open(self, broker, (uint32_t)queue, serial, &handle)
	                              : SHMQ_OK;
	if (epoch != self->epoch) { /* another thread was faster */
		if (status == SHMQ_OK)
			Py_DECREF((PyObject *)broker);
		return true;
	}
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "open '%U/%U' in a child process", self->topic,
		             self->channel);
		Py_DECREF((PyObject *)broker);
		return false;
	}
	/* With pins, keep the mapping: views of the parent's messages stay readable. */
	if (!self->broker->active && !self->pinned)
		shmq_consumer_free(self->handle);
	Py_DECREF((PyObject *)self->broker);
	self->broker = broker;
	self->handle = handle;
	self->pinned = 0;
	self->epoch++;
	return true;
}

int beacon_tell(PyObject *beacon)
{
	PyObject *result = PyObject_CallNoArgs(beacon);

	Py_XDECREF(result);
	return result ? 0 : -1;
}

/* Do what `status` asks for before the next try. Returns 1: try again; 0: the time is over; -1: an
 * exception is set. */
static int consumer_retry(consumer_object *self, attempt *a, int status)
{
	switch (status) {
	case SHMQ_EMPTY:
		if (!attempt_waits(a))
			return UNLIKELY(self->beacon != NULL) ? beacon_tell(self->beacon) : 0;
		CORE_WAIT(self->broker, status, a->deadline ? a->deadline : FOR_EVER, WAIT_SLICE_NS,
		          shmq_consumer_wait(self->handle, until));
		return PyErr_CheckSignals() < 0 ? -1 : 1;
	case SHMQ_NEED_MAP:
		return broker_map_missing(self->broker, a) ? 1 : -1;
	case SHMQ_FORKED:
		return consumer_reopen(self) ? 1 : -1;
	}
	raise_status(self->state, broker_gone(self->broker, status), NULL, "take from '%U/%U'",
	             self->topic, self->channel);
	return -1;
}

/* ---- take ----------------------------------------------------------------------------------- */

void consumer_untake(consumer_object *self, const shmq_message *messages, uint32_t n)
{
	if (PyErr_Occurred() && self->handle)
		shmq_release(self->handle, messages, n, 0, NULL, shmq_now() + LOCK_SLICE_NS);
}

/* The body of a sealed message that was taken, which is then finished; a Message if it is long or
 * not sealed. Returns
 * NULL without an exception if the message was lost before it was finished. */
static PyObject *body_new(consumer_object *self, const shmq_message *m)
{
	PyObject *body;
	int status = CORE_RAISED;

	if (m->length > BODY_COPIED || UNLIKELY(!m->sealed))
		return message_new(self, m);
	body = PyBytes_FromStringAndSize(m->body, (Py_ssize_t)m->length);
	if (LIKELY(body != NULL))
		status = consumer_settle(self, self->epoch, SETTLE_FINISH, m, 1, 0, NULL);
	if (LIKELY(status == SHMQ_OK))
		return body;
	Py_XDECREF(body);
	if (status != CORE_RAISED && status != SHMQ_NOT_IN_FLIGHT)
		settle_raise(self, status, SETTLE_FINISH, self->epoch, 1, 1, m->id);
	return NULL;
}

/* Returns what `make` makes of the next message, or NULL without an exception if the time is over.
 * make: returns NULL without an exception if the message was lost. */
static inline PyObject *take_one(consumer_object *self, int64_t timeout,
                                 PyObject *(*make)(consumer_object *, const shmq_message *))
{
	attempt a = {.timeout = timeout};
	shmq_message m;
	uint32_t got;
	int status, again;

	do {
		again = 1;
		if (!consumer_usable(self))
			return NULL;
		CORE_CALL(self->broker, status, shmq_take(self->handle, &m, 1, until, &got));
		if (LIKELY(status == SHMQ_OK)) {
			PyObject *made = make(self, &m);

			if (made)
				return made;
			consumer_untake(self, &m, 1);
			if (PyErr_Occurred())
				return NULL;
		} else {
			again = consumer_retry(self, &a, status);
		}
	} while (again > 0);
	return NULL;
}

/* The timeout of take and take_body, ns. Returns false with an exception. */
static bool take_timeout(const char *call, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames, int64_t *timeout_ns)
{
	PyObject *timeout = NULL;

	if (nargs == 1 && !kwnames)
		timeout = args[0];
	else if ((nargs || kwnames) && ARGUMENTS(call, 0, {"timeout", ARGUMENT_OBJECT, &timeout}) < 0)
		return false;
	return seconds_parse(timeout, "timeout", true, timeout_ns) == 0;
}

static FAST_METHOD(consumer, take)
{
	PyObject *message;
	int64_t timeout;

	if (!take_timeout("take", args, nargs, kwnames, &timeout))
		return NULL;
	message = take_one(self, timeout, message_new);
	return message || PyErr_Occurred() ? message : Py_NewRef(Py_None);
}

static FAST_METHOD(consumer, take_body)
{
	PyObject *body;
	int64_t timeout;

	if (!take_timeout("take_body", args, nargs, kwnames, &timeout))
		return NULL;
	body = take_one(self, timeout, body_new);
	return body || PyErr_Occurred() ? body : Py_NewRef(Py_None);
}

/* Room for n messages, which this thread owns until scratch_put. */
static shmq_message *scratch_get(consumer_object *self, uint32_t n, uint32_t *size)
{
	shmq_message *scratch = self->scratch;

	self->scratch = NULL;
	*size = scratch ? self->scratch_size : 0;
	if (*size >= n)
		return scratch;
	PyMem_Free(scratch);
	*size = n;
	scratch = PyMem_Malloc(n * sizeof(*scratch));
	if (!scratch)
		PyErr_NoMemory();
	return scratch;
}

static void scratch_put(consumer_object *self, shmq_message *scratch, uint32_t size)
{
	PyMem_Free(self->scratch);
	self->scratch = scratch;
	self->scratch_size = size;
}

static FAST_METHOD(consumer, take_many)
{
	attempt a = {.timeout = FOR_EVER};
	PyObject *batch = NULL;
	shmq_message *scratch;
	uint32_t got, size, n;
	int64_t most;
	int status, again;

	if (ARGUMENTS("take_many", 1, {"n", ARGUMENT_I64, &most},
	              {"timeout", ARGUMENT_TIMEOUT, &a.timeout}) < 0)
		return NULL;
	if (most < 1)
		return PyErr_Format(PyExc_ValueError, "take_many() needs n of 1 or more, not %lld",
		                    (long long)most);
	n = (uint32_t)(most < TAKE_MOST ? most : TAKE_MOST);
	scratch = scratch_get(self, n, &size);
	if (!scratch)
		return NULL;
	do {
		again = -1;
		if (!consumer_usable(self))
			break;
		CORE_CALL(self->broker, status, shmq_take(self->handle, scratch, n, until, &got));
		if (LIKELY(status == SHMQ_OK)) {
			batch = batch_new(self, scratch, got);
			if (!batch)
				consumer_untake(self, scratch, got);
			again = batch || PyErr_Occurred() ? -1 : 1;
		} else {
			again = consumer_retry(self, &a, status);
		}
	} while (again > 0);
	scratch_put(self, scratch, size);
	return again == 0 ? batch_new(self, NULL, 0) : batch;
}

/* Returns true if no message will come any more, and nothing is wrong. */
static bool consumer_ended(consumer_object *self)
{
	return self->closed || self->broker->closed ||
	       broker_gone(self->broker, SHMQ_GONE) == CORE_STOPPED;
}

static NEXT(consumer)
{
	PyObject *message;

	if (self->handle && (self->closed || self->broker->closed))
		return NULL;
	message = take_one(self, FOR_EVER, message_new);
	if (!message && self->handle && PyErr_ExceptionMatches(self->state->exceptions[-SHMQ_CLOSED]) &&
	    consumer_ended(self))
		PyErr_Clear(); /* it was closed, or the broker stopped, while it waited: the iteration ends */
	return message;
}

/* ---- dead letters, the end --------------------------------------------------------------- */

static FAST_METHOD(consumer, redrive)
{
	PyObject *given;
	message_object *message;
	uint32_t queue;
	uint64_t serial;
	uint8_t ok;
	int status;

	if (ARGUMENTS("redrive", 3, {"message", ARGUMENT_OBJECT, &given},
	              {"queue", ARGUMENT_U32, &queue}, {"serial", ARGUMENT_U64, &serial}) < 0)
		return NULL;
	if (!Py_IS_TYPE(given, self->state->message))
		return PyErr_Format(PyExc_TypeError, "redrive() needs a Message, not %R", given);
	message = (message_object *)given;
	if (!consumer_usable(self))
		return NULL;
	if (message->epoch != self->epoch)
		status = SHMQ_NOT_IN_FLIGHT;
	else
		BROKER_CALL(self->broker, status,
		            shmq_redrive(message->consumer->handle, &message->message, 1, queue, serial,
		                         &ok, until));
	if (status == SHMQ_OK || status == SHMQ_NOT_IN_FLIGHT)
		message_settled(message); /* after any other failure the caller still holds it */
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "redrive a message of '%U/%U'", self->topic,
		                    self->channel);
	Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------------------- */

static INIT(consumer)
{
	static char *names[] = {"broker",        "queue",       "serial",     "topic",     "channel",
	                        "max_in_flight", "msg_timeout", "batch_type", "on_forked", NULL};
	PyObject *broker, *topic, *channel, *batch_type, *on_forked;
	unsigned long long serial;
	long long msg_timeout;
	unsigned queue;
	int status, r;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IKUUILO!O:Consumer", names,
	                                 self->state->broker, &broker, &queue, &serial, &topic,
	                                 &channel, &self->max_in_flight, &msg_timeout, &PyType_Type,
	                                 &batch_type, &on_forked))
		return -1;
	r = PyObject_IsSubclass(batch_type, (PyObject *)self->state->batch);
	if (r == 0)
		PyErr_SetString(PyExc_TypeError, "batch_type must be a subclass of Batch");
	if (r <= 0)
		return -1;
	if (!init_first(self->handle != NULL, "Consumer"))
		return -1;
	self->msg_timeout = msg_timeout;
	status = consumer_open(self, (broker_object *)broker, queue, serial, &self->handle);
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "consume from '%U/%U'", topic, channel);
		return -1;
	}
	self->broker = (broker_object *)Py_NewRef(broker);
	self->topic = Py_NewRef(topic);
	self->channel = Py_NewRef(channel);
	self->batch_type = (PyTypeObject *)Py_NewRef(batch_type);
	self->on_forked = Py_NewRef(on_forked);
	return 0;
}

static NOARGS_METHOD(consumer, close)
{
	int status = SHMQ_OK;

	if (!self->handle || self->closed)
		Py_RETURN_NONE;
	self->closed = true;
	if (!self->broker->closed)
		CORE_CALL(self->broker, status, shmq_consumer_close(self->handle, until));
	if (status == CORE_RAISED) {
		self->closed = false; /* a signal handler raised: close may be called again */
		return NULL;
	}
	shmq_consumer_wake(self->handle);
	if (status != SHMQ_OK && status != SHMQ_FORKED && status != SHMQ_CLOSED && status != SHMQ_GONE)
		return raise_status(self->state, status, NULL, "close the consumer of '%U/%U'", self->topic,
		                    self->channel);
	Py_RETURN_NONE;
}

static int consumer_clear(consumer_object *self)
{
	Py_CLEAR(self->on_forked);
	Py_CLEAR(self->beacon);
	return 0;
}

static DEALLOC(consumer)
{
	PyObject_GC_UnTrack(self);
	if (self->handle) {
		unpin_pending(self);
		if (!self->closed && !self->broker->closed)
			shmq_consumer_close(self->handle, shmq_now() + LOCK_SLICE_NS);
		shmq_consumer_free(self->handle);
	}
	while (self->pending) { /* detach gives the pins back */
		pending_unpin *next = self->pending->next;

		PyMem_Free(self->pending);
		self->pending = next;
	}
	PyMem_Free(self->scratch);
	Py_XDECREF(self->spare);
	consumer_clear(self);
	Py_XDECREF((PyObject *)self->batch_type);
	Py_XDECREF(self->topic);
	Py_XDECREF(self->channel);
	Py_XDECREF((PyObject *)self->broker);
	object_free((PyObject *)self);
}

static int consumer_traverse(consumer_object *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE((PyObject *)self));
	Py_VISIT(self->broker);
	Py_VISIT(self->batch_type);
	Py_VISIT(self->on_forked);
	Py_VISIT(self->beacon);
	return 0;
}

static GETTER(consumer, in_flight)
{
	shmq_consumer_info info;

	if (!self->handle || self->closed || self->broker->closed)
		return PyLong_FromLong(0);
	shmq_consumer_get_info(self->handle, &info);
	return PyLong_FromUnsignedLong(info.in_flight);
}

static GETTER(consumer, session)
{
	shmq_consumer_info info;

	if (!self->handle || self->closed || self->broker->closed)
		Py_RETURN_NONE;
	shmq_consumer_get_info(self->handle, &info);
	return Py_BuildValue("(IKI)", info.queue, (unsigned long long)info.serial, info.session);
}

static METHOD(consumer, limit, (U32, max_in_flight), )
{
	if (!consumer_usable(self))
		return NULL;
	self->max_in_flight = max_in_flight;
	shmq_consumer_limit(self->handle, max_in_flight);
	Py_RETURN_NONE;
}

static PyMethodDef consumer_methods[] = {
	METHOD_ROW(consumer, Consumer, take, FAST),
	METHOD_ROW(consumer, Consumer, take_body, FAST),
	METHOD_ROW(consumer, Consumer, take_many, FAST),
	METHOD_ROW(consumer, Consumer, limit, FAST),
	METHOD_ROW(consumer, Consumer, redrive, FAST),
	METHOD_ROW(consumer, Consumer, close, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef consumer_properties[] = {
	GETTER_ROW(consumer, Consumer, in_flight),
	GETTER_ROW(consumer, Consumer, session),
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef consumer_members[] = {
	MEMBER_ROW(consumer, Consumer, topic, T_OBJECT, topic),
	MEMBER_ROW(consumer, Consumer, channel, T_OBJECT, channel),
	MEMBER_ROW(consumer, Consumer, closed, T_BOOL, closed),
	MEMBER_ROW(consumer, Consumer, max_in_flight, T_UINT, max_in_flight),
	MEMBER_ROW(consumer, Consumer, _broker, T_OBJECT, broker),
	{"_beacon", T_OBJECT, offsetof(consumer_object, beacon), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot consumer_slots[] = {
	{Py_tp_doc, DOC_Consumer},           {Py_tp_new, type_new},
	{Py_tp_init, consumer_init},         {Py_tp_dealloc, consumer_dealloc},
	{Py_tp_traverse, consumer_traverse}, {Py_tp_clear, consumer_clear},
	{Py_tp_iter, PyObject_SelfIter},     {Py_tp_iternext, consumer_next},
	{Py_tp_methods, consumer_methods},   {Py_tp_getset, consumer_properties},
	{Py_tp_members, consumer_members},   {0, NULL},
};

TYPE_SPEC(consumer, Consumer, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);

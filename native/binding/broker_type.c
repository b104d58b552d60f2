/* _native.Broker: attach, look up, ask; what only the supervisor calls is in supervise.c. */
#include "module.h"

#include <time.h>
#include <unistd.h>

#define MISSING_MAX 16 /* segments gone in a row while one operation looks for its queues */

/* ---- segment: what Broker.view() exports ---------------------------------------------------- */

typedef struct segment_object {
	PyObject_HEAD
	const void *base;
	uint64_t length;
	void *reference;
} segment_object;

static int segment_getbuffer(segment_object *self, Py_buffer *view, int flags)
{
	return PyBuffer_FillInfo(view, (PyObject *)self, (void *)self->base, (Py_ssize_t)self->length,
	                         1, flags);
}

static void segment_dealloc(segment_object *self)
{
	if (self->reference)
		shmq_segment_release(self->reference);
	object_free((PyObject *)self);
}

static PyType_Slot segment_slots[] = {
	{Py_tp_dealloc, segment_dealloc},
	{Py_bf_getbuffer, segment_getbuffer},
	{0, NULL},
};

PyType_Spec segment_spec = {
	.name = "shmq._native.Segment",
	.basicsize = sizeof(segment_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = segment_slots,
};

/* ---- calls that every type uses ------------------------------------------------------------- */

bool broker_usable(broker_object *self, const char *tried)
{
	if (LIKELY(self->handle && !self->closed))
		return true;
	raise_status(self->state, SHMQ_CLOSED, "attach again", "%s", tried);
	return false;
}

int broker_gone(broker_object *self, int status)
{
	bool stopped = status == SHMQ_GONE && self->handle && shmq_broker_stopped(self->handle);

	return stopped ? CORE_STOPPED : status;
}

bool attempt_waits(attempt *a)
{
	if (a->timeout == 0 || a->timeout == FOR_EVER)
		return a->timeout != 0;
	if (!a->deadline)
		a->deadline = later_by(shmq_now(), a->timeout);
	return shmq_now() < a->deadline;
}

static bool segment_missing(broker_object *self, shmq_broker *handle, attempt *a, uint32_t queue,
                            uint64_t serial)
{
	if (++a->missing > MISSING_MAX) {
		raise_status(self->state, SHMQ_GONE, NULL, "open queue segment %llu",
		             (unsigned long long)serial);
		return false;
	}
	shmq_broker_unmap(handle, queue, serial);
	return true;
}

/* leaving: `handle` is the caller's alone, to be given back; else it is the broker's, which another
 * thread may detach whenever Python runs. */
static bool map_missing(broker_object *self, shmq_broker *handle, bool leaving, attempt *a)
{
	PyObject *opened;
	uint64_t serial;
	uint32_t queue;
	int fd, status;

	shmq_broker_missing(handle, &queue, &serial);
	if (!self->opener)
		return segment_missing(self, handle, a, queue, serial);
	opened = PyObject_CallFunction(self->opener, "K", (unsigned long long)serial);
	if (!opened && PyErr_ExceptionMatches(PyExc_FileNotFoundError)) {
		PyErr_Clear();
		return (leaving || broker_usable(self, "open a queue")) &&
		       segment_missing(self, handle, a, queue, serial);
	}
	if (!opened)
		return false;
	fd = (int)PyLong_AsLong(opened);
	Py_DECREF(opened);
	if (fd == -1 && PyErr_Occurred())
		return false;
	if (!leaving && !broker_usable(self, "open a queue")) {
		close(fd);
		return false;
	}
	status = shmq_broker_map(handle, queue, serial, fd);
	close(fd);
	if (status == SHMQ_GONE)
		return segment_missing(self, handle, a, queue, serial);
	if (status != SHMQ_OK)
		raise_status(self->state, status, NULL, "map queue segment %llu of '%U'",
		             (unsigned long long)serial, self->instance);
	return status == SHMQ_OK;
}

bool broker_map_missing(broker_object *self, attempt *a)
{
	return broker_usable(self, "open a queue") && map_missing(self, self->handle, false, a);
}

int forked_call(module_state *state, PyObject *on_forked, broker_object **broker, uint64_t *first,
                uint64_t *second)
{
	PyObject *result = on_forked ? PyObject_CallNoArgs(on_forked) : NULL;
	PyObject *object;
	unsigned long long a, b;
	int r = -1;

	if (!result) {
		if (!on_forked)
			raise_status(state, SHMQ_FORKED, NULL, "go on in a child process");
		return -1;
	}
	if (!PyTuple_Check(result)) {
		PyErr_SetString(PyExc_TypeError, "on_forked() must return a tuple of three");
	} else if (PyArg_ParseTuple(result, "O!KK", state->broker, &object, &a, &b)) {
		*broker = (broker_object *)Py_NewRef(object);
		*first = a;
		*second = b;
		r = 0;
	}
	Py_DECREF(result);
	return r;
}

/* ---- life ----------------------------------------------------------------------------------- */

static int broker_init(broker_object *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"fd", "opener", "kind", "instance", NULL};
	PyObject *opener, *instance = NULL;
	int fd, kind = SHMQ_AS_CLIENT, status;
	shmq_broker *handle;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO|iU:Broker", names, &fd, &opener, &kind,
	                                 &instance))
		return -1;
	if (self->handle || self->closed) {
		PyErr_SetString(PyExc_RuntimeError, "Broker.__init__() was called twice");
		return -1;
	}
	self->instance = instance ? Py_NewRef(instance) : PyUnicode_FromString("");
	if (!self->instance)
		return -1;
	status = shmq_broker_open(fd, &handle);
	if (status == SHMQ_OK) {
		CORE_CALL_SLOWLY(self, status, shmq_broker_attach(handle, (enum shmq_kind)kind, until));
		if (status != SHMQ_OK)
			shmq_broker_close(handle);
	}
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "attach to '%U'", self->instance);
		Py_CLEAR(self->instance);
		return -1;
	}
	self->handle = handle;
	self->opener = Py_NewRef(opener);
	return 0;
}

/* Wait till no thread is in the core through this broker (each of them is woken, or looks up every
 * 250 ms). */
static int broker_drain(broker_object *self)
{
	const struct timespec tick = {0, 1000000};

	while (self->active && !shmq_broker_forked(self->handle)) {
		waiters_wake(self);
		Py_BEGIN_ALLOW_THREADS
		nanosleep(&tick, NULL);
		Py_END_ALLOW_THREADS
		if (PyErr_CheckSignals() < 0)
			return -1;
	}
	return 0;
}

static PyObject *broker_detach(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
	shmq_broker *handle;
	int64_t patience = FOR_EVER, deadline;
	attempt mapping = {0};
	int status;

	if (ARGUMENTS("detach", 0, {"patience", ARGUMENT_I64, &patience}) < 0)
		return NULL;
	deadline = later_by(shmq_now(), patience);
	self->closed = true;
	if (!self->handle)
		Py_RETURN_NONE;
	if (broker_drain(self) < 0)
		return NULL;
	handle = self->handle;
	self->handle = NULL; /* another thread's detach has nothing left to do */
	if (!handle)
		Py_RETURN_NONE;
	do {
		CORE_WAIT(self, status, deadline, LOCK_SLICE_NS, shmq_broker_detach(handle, until));
		/* a topic that somebody died in is repaired with all its queues, also those of others */
		if (status == SHMQ_NEED_MAP && !map_missing(self, handle, true, &mapping))
			status = CORE_RAISED;
		if (status == SHMQ_AGAIN && PyErr_CheckSignals() < 0)
			status = CORE_RAISED;
	} while (status == SHMQ_NEED_MAP || (status == SHMQ_AGAIN && shmq_now() < deadline));
	if (status == CORE_RAISED || status == SHMQ_AGAIN) {
		self->handle = handle;
		return status == CORE_RAISED
		               ? NULL
		               : raise_status(self->state, status, NULL, "detach from '%U'", self->instance);
	}
	shmq_broker_close(handle);
	if (status != SHMQ_OK && status != SHMQ_FORKED && status != SHMQ_CLOSED && status != SHMQ_GONE)
		return raise_status(self->state, status, NULL, "detach from '%U'", self->instance);
	Py_RETURN_NONE;
}

static int broker_clear(broker_object *self)
{
	Py_CLEAR(self->opener);
	return 0;
}

static void broker_dealloc(broker_object *self)
{
	PyObject_GC_UnTrack(self);
	if (self->handle) {
		int status = SHMQ_FORKED;

		if (!shmq_broker_forked(self->handle))
			status = shmq_broker_detach(self->handle, shmq_now() + LOCK_SLICE_NS);
		/* The reaper takes care of what a stopped lock holder, or a repair that needs queues we
		 * have not mapped, keeps us from giving back. */
		if (status != SHMQ_AGAIN && status != SHMQ_NEED_MAP)
			shmq_broker_close(self->handle);
	}
	broker_clear(self);
	Py_XDECREF(self->instance);
	object_free((PyObject *)self);
}

static int broker_traverse(broker_object *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE((PyObject *)self));
	Py_VISIT(self->opener);
	return 0;
}

static PyObject *broker_client(broker_object *self, void *unused)
{
	(void)unused;
	if (!broker_usable(self, "look at the client entry"))
		return NULL;
	return PyLong_FromUnsignedLong(shmq_broker_client(self->handle));
}

static PyObject *broker_forked(broker_object *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(self->handle && shmq_broker_forked(self->handle));
}

static PyObject *broker_supervisor_alive(broker_object *self, PyObject *unused)
{
	(void)unused;
	if (!broker_usable(self, "look for the supervisor"))
		return NULL;
	return PyBool_FromLong(shmq_supervisor_alive(self->handle));
}

/* ---- look ----------------------------------------------------------------------------------- */

static PyObject *broker_view(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
	segment_object *segment;
	PyObject *view = NULL;
	int64_t queue = -1;
	int status;

	if (ARGUMENTS("view", 0, {"queue", ARGUMENT_I64, &queue}) < 0)
		return NULL;
	segment = PyObject_New(segment_object, self->state->segment);
	if (!segment)
		return NULL;
	segment->reference = NULL;
	BROKER_CALL(self, status,
	            ((void)until,
	             shmq_segment_view(self->handle, queue < 0 ? SHMQ_AS_DIRECTORY : (uint32_t)queue,
	                               &segment->base, &segment->length, &segment->reference)));
	if (status == SHMQ_OK)
		view = PyMemoryView_FromObject((PyObject *)segment);
	else if (queue < 0)
		raise_status(self->state, status, NULL, "view the directory");
	else
		raise_status(self->state, status, NULL, "view queue %u", (unsigned)queue);
	Py_DECREF((PyObject *)segment);
	return view;
}

static PyObject *broker_find_topic(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                                   PyObject *kwnames)
{
	uint32_t topic, generation;
	const char *name;
	int status;

	if (ARGUMENTS("find_topic", 1, {"topic", ARGUMENT_TEXT, &name}) < 0 ||
	    !broker_usable(self, "find a topic"))
		return NULL;
	status = shmq_topic_find(self->handle, name, &topic, &generation);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "find topic '%s'", name);
	return Py_BuildValue("(II)", topic, generation);
}

static PyObject *broker_find_queue(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                                   PyObject *kwnames)
{
	uint32_t topic, queue;
	const char *channel;
	uint64_t serial;
	int status;

	if (ARGUMENTS("find_queue", 2, {"topic", ARGUMENT_U32, &topic},
	              {"channel", ARGUMENT_TEXT_OR_NONE, &channel}) < 0 ||
	    !broker_usable(self, "find a channel"))
		return NULL;
	status = shmq_queue_find(self->handle, topic, channel, &queue, &serial);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "find channel '%s'", channel ? channel : "");
	return Py_BuildValue("(IK)", queue, (unsigned long long)serial);
}

/* ---- ask and change ------------------------------------------------------------------------- */

static const char *request_text(int kind)
{
	switch (kind) {
	case SHMQ_CREATE_TOPIC:
		return "create topic";
	case SHMQ_CREATE_CHANNEL:
		return "create channel";
	case SHMQ_CREATE_BACKLOG:
		return "create the backlog of topic";
	case SHMQ_DELETE_TOPIC:
		return "delete topic";
	case SHMQ_DELETE_CHANNEL:
		return "delete channel";
	}
	return "ask about";
}

/* 0, the supervisor's answer, SHMQ_TIMEOUT, SHMQ_NOT_RUNNING or CORE_RAISED. */
static int request_answer(broker_object *self, uint32_t ticket, int64_t deadline)
{
	int status;

	do {
		CORE_WAIT(self, status, deadline, WAIT_SLICE_NS,
		          shmq_request_wait(self->handle, ticket, until));
		if (status != SHMQ_TIMEOUT && status != SHMQ_INTERRUPTED)
			return status;
		if (PyErr_CheckSignals() < 0 || !broker_usable(self, "wait for the supervisor"))
			return CORE_RAISED;
	} while (shmq_now() < deadline);
	return SHMQ_TIMEOUT;
}

static PyObject *broker_request(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                                PyObject *kwnames)
{
	const char *topic, *channel = NULL;
	PyObject *timeout = Py_None;
	int64_t deadline = FOR_EVER;
	uint32_t ticket;
	int kind, status;

	if (ARGUMENTS("request", 2, {"kind", ARGUMENT_INT, &kind}, {"topic", ARGUMENT_TEXT, &topic},
	              {"channel", ARGUMENT_TEXT_OR_NONE, &channel},
	              {"timeout", ARGUMENT_OBJECT, &timeout}) < 0)
		return NULL;
	if (timeout != Py_None) {
		int64_t ns = PyLong_AsLongLong(timeout);

		if (ns == -1 && PyErr_Occurred())
			return NULL;
		deadline = later_by(shmq_now(), ns);
	}
	BROKER_CALL(self, status,
	            shmq_request_post(self->handle, (enum shmq_request_kind)kind, topic, channel, until,
	                              &ticket));
	if (status == SHMQ_OK) {
		status = request_answer(self, ticket, deadline);
		if (self->handle) /* not detached meanwhile */
			shmq_request_end(self->handle, ticket);
	}
	if (status != SHMQ_OK) {
		const char *name = PyUnicode_AsUTF8AndSize(self->instance, NULL);
		char start[128];

		PyOS_snprintf(start, sizeof(start), "start one with `shmq serve --instance %s`",
		              name ? name : "NAME");
		return raise_status(self->state, status, status == SHMQ_NOT_RUNNING ? start : NULL,
		                    "%s '%s%s%s' on '%U'", request_text(kind), topic, channel ? "/" : "",
		                    channel ? channel : "", self->instance);
	}
	Py_RETURN_NONE;
}

static PyObject *broker_pause_topic(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames)
{
	uint32_t topic, generation;
	bool paused;
	int status;

	if (ARGUMENTS("pause_topic", 3, {"topic", ARGUMENT_U32, &topic},
	              {"generation", ARGUMENT_U32, &generation},
	              {"paused", ARGUMENT_BOOL, &paused}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_topic_pause(self->handle, topic, generation, paused, until));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "pause or unpause topic %u", topic);
	Py_RETURN_NONE;
}

static PyObject *broker_pause_channel(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                                      PyObject *kwnames)
{
	uint64_t serial;
	uint32_t queue;
	bool paused;
	int status;

	if (ARGUMENTS("pause_channel", 3, {"queue", ARGUMENT_U32, &queue},
	              {"serial", ARGUMENT_U64, &serial}, {"paused", ARGUMENT_BOOL, &paused}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_channel_pause(self->handle, queue, serial, paused, until));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "pause or unpause queue %u", queue);
	Py_RETURN_NONE;
}

static PyObject *broker_empty(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	uint64_t serial, dropped = 0;
	uint32_t queue;
	int status;

	if (ARGUMENTS("empty", 2, {"queue", ARGUMENT_U32, &queue}, {"serial", ARGUMENT_U64, &serial}) <
	    0)
		return NULL;
	BROKER_CALL(self, status, shmq_queue_empty(self->handle, queue, serial, until, &dropped));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "empty queue %u", queue);
	return PyLong_FromUnsignedLongLong(dropped);
}

static PyMethodDef broker_methods[] = {
	METHOD("supervisor_alive", broker_supervisor_alive, METH_NOARGS,
	       "supervisor_alive($self)\n--\n\nDoes a supervisor hold its life lock?"),
	METHOD("detach", broker_detach, FAST,
	       "detach($self, patience=None)\n--\n\nGive back what this client holds and its entry."),
	METHOD("view", broker_view, FAST,
	       "view($self, queue=-1)\n--\n\nRead-only bytes of a segment; -1: the directory."),
	METHOD("find_topic", broker_find_topic, FAST,
	       "find_topic($self, topic)\n--\n\n(index, generation) or None."),
	METHOD("find_queue", broker_find_queue, FAST,
	       "find_queue($self, topic, channel)\n--\n\n(index, serial) or None."),
	METHOD("request", broker_request, FAST,
	       "request($self, kind, topic, channel=None, timeout=None)\n--\n\nAsk the supervisor."),
	METHOD("pause_topic", broker_pause_topic, FAST,
	       "pause_topic($self, topic, generation, paused)\n--\n\nPause or unpause."),
	METHOD("pause_channel", broker_pause_channel, FAST,
	       "pause_channel($self, queue, serial, paused)\n--\n\nPause or unpause."),
	METHOD("empty", broker_empty, FAST,
	       "empty($self, queue, serial)\n--\n\nDrop its messages; how many."),
#define X(name, doc) METHOD(#name, broker_##name, FAST, doc),
	SUPERVISOR_METHODS(X)
	LEASE_METHODS(X)
#undef X
	{NULL, NULL, 0, NULL},
};

static PyObject *broker_stopped(broker_object *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(self->handle && shmq_broker_stopped(self->handle));
}

static PyGetSetDef broker_properties[] = {
	{"client", (getter)broker_client, NULL, "Index of the client entry.", NULL},
	{"forked", (getter)broker_forked, NULL, "Does the handle belong to the parent?", NULL},
	{"closed", closed_get, NULL, "Was detach called?", (void *)offsetof(broker_object, closed)},
	{"stopped", (getter)broker_stopped, NULL, "Was the instance stopped in order?", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot broker_slots[] = {
	{Py_tp_doc, "Broker(fd, opener, kind=0, instance='')\n--\n\nOne attachment to an instance."},
	{Py_tp_new, type_new},
	{Py_tp_init, broker_init},
	{Py_tp_dealloc, broker_dealloc},
	{Py_tp_traverse, broker_traverse},
	{Py_tp_clear, broker_clear},
	{Py_tp_methods, broker_methods},
	{Py_tp_getset, broker_properties},
	{0, NULL},
};

PyType_Spec broker_spec = {
	.name = "shmq._native.Broker",
	.basicsize = sizeof(broker_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = broker_slots,
};

/* _native.Broker: attach, look up, request. supervisor_ and lease_methods.c have the rest. */
#include "types.h"

#include <time.h>

/* ---- segment: the object whose buffer Broker.view() returns --------------------------------- */

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

static DEALLOC(segment)
{
	if (self->reference)
		shmq_segment_release(self->reference);
	object_free((PyObject *)self);
}

static PyType_Slot segment_slots[] = {
	{Py_tp_doc, DOC_Segment},
	{Py_tp_dealloc, segment_dealloc},
	{Py_bf_getbuffer, segment_getbuffer},
	{0, NULL},
};

TYPE_SPEC(segment, Segment, Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE);

/* ---- life ----------------------------------------------------------------------------------- */

static INIT(broker)
{
	static char *names[] = {"fd", "opener", "kind", "instance", NULL};
	PyObject *opener, *instance = NULL;
	int fd, kind = SHMQ_AS_CLIENT, status;
	shmq_broker *handle;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO|iU:Broker", names, &fd, &opener, &kind,
	                                 &instance))
		return -1;
	if (!init_first(self->handle || self->closed, "Broker"))
		return -1;
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

/* Wait until no thread is in the core through this broker. Each is woken, or looks up within
 * 250 ms. */
static int broker_drain(broker_object *self)
{
	const struct timespec tick = {0, 1000000};

	while (self->active && !shmq_broker_forked(self->handle)) {
		for (const sleeper *each = self->sleepers; each; each = each->next)
			each->wake(each->self);
		Py_BEGIN_ALLOW_THREADS
		nanosleep(&tick, NULL);
		Py_END_ALLOW_THREADS
		if (PyErr_CheckSignals() < 0)
			return -1;
	}
	return 0;
}

static METHOD(broker, detach, , (I64_OR_NONE, patience, FOR_EVER))
{
	int64_t deadline = later_by(shmq_now(), patience);
	attempt mapping = {0};
	shmq_broker *handle;
	int status;

	self->closed = true;
	if (!self->handle)
		Py_RETURN_NONE;
	if (broker_drain(self) < 0)
		return NULL;
	handle = self->handle;
	self->handle = NULL; /* a detach in another thread finds nothing to do */
	if (!handle)
		Py_RETURN_NONE;
	do {
		CORE_WAIT(self, status, deadline, LOCK_SLICE_NS, shmq_broker_detach(handle, until));
		/* a topic in which a client died is repaired with all of its queues, so map them */
		if (status == SHMQ_NEED_MAP && !broker_map_for(self, handle, true, &mapping))
			status = CORE_RAISED;
		if (status == SHMQ_AGAIN && PyErr_CheckSignals() < 0)
			status = CORE_RAISED;
	} while (status == SHMQ_NEED_MAP || (status == SHMQ_AGAIN && shmq_now() < deadline));
	if (status == CORE_RAISED || status == SHMQ_AGAIN) {
		self->handle = handle;
		return status == CORE_RAISED ? NULL
		                             : raise_status(self->state, status, NULL, "detach from '%U'",
		                                            self->instance);
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

static DEALLOC(broker)
{
	PyObject_GC_UnTrack(self);
	if (self->handle) {
		int status = SHMQ_FORKED;

		if (!shmq_broker_forked(self->handle))
			status = shmq_broker_detach(self->handle, shmq_now() + LOCK_SLICE_NS);
		/* A stopped lock holder, or a repair that needs queues we have not mapped, may keep us
		 * from giving everything back; the reaper does it then. */
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

static GETTER(broker, client)
{
	if (!broker_usable(self, "look at the client entry"))
		return NULL;
	return PyLong_FromUnsignedLong(shmq_broker_client(self->handle));
}

static GETTER(broker, forked)
{
	return PyBool_FromLong(self->handle && shmq_broker_forked(self->handle));
}

static NOARGS_METHOD(broker, supervisor_alive)
{
	if (!broker_usable(self, "look for the supervisor"))
		return NULL;
	return PyBool_FromLong(shmq_supervisor_alive(self->handle));
}

/* ---- look ----------------------------------------------------------------------------------- */

static METHOD(broker, view, , (I64, queue, -1))
{
	segment_object *segment;
	PyObject *view = NULL;
	int status;

	segment = PyObject_New(segment_object, self->state->segment);
	if (!segment)
		return NULL;
	segment->reference = NULL;
	BROKER_CALL(self, status,
	            shmq_segment_view(self->handle, queue < 0 ? SHMQ_AS_DIRECTORY : (uint32_t)queue,
	                              &segment->base, &segment->length, &segment->reference));
	if (status == SHMQ_OK)
		view = PyMemoryView_FromObject((PyObject *)segment);
	else if (queue < 0)
		raise_status(self->state, status, NULL, "view the directory");
	else
		raise_status(self->state, status, NULL, "view queue %u", (unsigned)queue);
	Py_DECREF((PyObject *)segment);
	return view;
}

static METHOD(broker, find_topic, (TEXT, topic), )
{
	uint32_t index, generation;
	int status;

	if (!broker_usable(self, "find a topic"))
		return NULL;
	status = shmq_topic_find(self->handle, topic, &index, &generation);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "find topic '%s'", topic);
	return Py_BuildValue("(II)", index, generation);
}

static METHOD(broker, find_queue, (U32, topic)(TEXT_OR_NONE, channel), )
{
	uint64_t serial;
	uint32_t queue;
	int status;

	if (!broker_usable(self, "find a channel"))
		return NULL;
	status = shmq_queue_find(self->handle, topic, channel, &queue, &serial);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "find channel '%s'", channel ? channel : "");
	return Py_BuildValue("(IK)", queue, (unsigned long long)serial);
}

/* ---- request and change --------------------------------------------------------------------- */

static const char *request_text(int kind)
{
	switch (kind) {
	case SHMQ_CREATE_TOPIC:
		return "create topic";
	case SHMQ_CREATE_CHANNEL:
	case SHMQ_JOIN_CHANNEL:
		return "create channel";
	case SHMQ_CREATE_BACKLOG:
		return "create the backlog of topic";
	case SHMQ_DELETE_TOPIC:
		return "delete topic";
	case SHMQ_DELETE_CHANNEL:
		return "delete channel";
	case SHMQ_DELETE_STORE:
		return "delete results store";
	}
	return "ask about";
}

/* Returns 0, the supervisor's answer, SHMQ_TIMEOUT, SHMQ_NOT_RUNNING or CORE_RAISED. */
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

int request_await(broker_object *self, uint32_t ticket, int64_t deadline)
{
	int status = request_answer(self, ticket, deadline);

	if (self->handle) /* it was not detached meanwhile */
		shmq_request_end(self->handle, ticket);
	return status;
}

PyObject *request_raise(broker_object *self, int status, const char *words, const char *topic,
                        const char *channel)
{
	return raise_status(self->state, status, status == SHMQ_NOT_RUNNING ? "" : NULL,
	                    "%s '%s%s%s' on '%U'", words, topic, channel ? "/" : "",
	                    channel ? channel : "", self->instance);
}

int broker_ask(broker_object *self, enum shmq_request_kind kind, const char *topic,
               const char *channel, int64_t deadline)
{
	uint32_t ticket;
	int status;

	BROKER_CALL(self, status,
	            shmq_request_post(self->handle, kind, topic, channel, until, &ticket));
	return status == SHMQ_OK ? request_await(self, ticket, deadline) : status;
}

static METHOD(broker, request, (INT, kind)(TEXT, topic),
              (TEXT_OR_NONE, channel, NULL)(I64_OR_NONE, timeout, FOR_EVER))
{
	int status = broker_ask(self, (enum shmq_request_kind)kind, topic, channel,
	                        later_by(shmq_now(), timeout));

	if (status != SHMQ_OK)
		return request_raise(self, status, request_text(kind), topic, channel);
	Py_RETURN_NONE;
}

/* clang-format off */
static NONE_METHOD(pause_topic, (U32, topic)(U32, generation)(BOOL, paused), BROKER_CALL,
                   shmq_topic_pause(self->handle, topic, generation, paused, until),
                   "pause or unpause topic %u", topic)
static NONE_METHOD(pause_channel, (U32, queue)(U64, serial)(BOOL, paused), BROKER_CALL,
                   shmq_channel_pause(self->handle, queue, serial, paused, until),
                   "pause or unpause queue %u", queue)
static COUNT_METHOD(empty, (U32, queue)(U64, serial), uint64_t, BROKER_CALL,
                    shmq_queue_empty(self->handle, queue, serial, until, &count),
                    "empty queue %u", queue)
static NONE_METHOD(held_finish, (U32, queue)(U64, serial)(U64, id)(INT, pid), BROKER_CALL,
                   shmq_held_finish(self->handle, &(shmq_held){serial, id, queue, pid}, until),
                   "finish message %llx", (unsigned long long)id)
static NONE_METHOD(held_requeue, (U32, queue)(U64, serial)(U64, id)(INT, pid)(I64, delay), BROKER_CALL,
                   shmq_held_requeue(self->handle, &(shmq_held){serial, id, queue, pid}, delay, until),
                   "requeue message %llx", (unsigned long long)id)
		/* clang-format on */

		/* Convert what is None, or settings; returns -1 with an exception. */
		static int settings_or_none(PyObject *given, shmq_settings *to, const shmq_settings **out)
{
	*out = given == Py_None ? NULL : to;
	return *out ? settings_parse(given, to) : 0;
}

/* True after SHMQ_OK, False after SHMQ_OVERTAKEN. */
static PyObject *configured(broker_object *self, int status, const char *kind, uint32_t index)
{
	if (status != SHMQ_OK && status != SHMQ_OVERTAKEN)
		return raise_status(self->state, status, NULL, "configure %s %u", kind, index);
	return PyBool_FromLong(status == SHMQ_OK);
}

static METHOD(broker, configure, (U32, queue)(U64, serial)(SETTINGS, settings),
              (OBJECT, was, Py_None))
{
	const shmq_settings *expected;
	shmq_settings before;
	int status;

	if (settings_or_none(was, &before, &expected) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_queue_configure(self->handle, queue, serial, expected, &settings, until));
	return configured(self, status, "queue", queue);
}

static METHOD(broker, configure_topic, (U32, topic)(U32, generation)(SETTINGS, settings),
              (OBJECT, was, Py_None))
{
	const shmq_settings *expected;
	shmq_settings before;
	int status;

	if (settings_or_none(was, &before, &expected) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_topic_configure(self->handle, topic, generation, expected, &settings, until));
	return configured(self, status, "topic", topic);
}

static METHOD(broker, settings, (U32, queue)(U64, serial), )
{
	shmq_settings found;
	int status;

	BROKER_CALL(self, status, shmq_queue_settings(self->handle, queue, serial, until, &found));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "read the settings of queue %u", queue);
	return settings_tuple(&found);
}

static METHOD(broker, dead_topic, (U32, queue)(U64, serial), )
{
	char name[80];
	int status;

	BROKER_CALL(self, status, shmq_dead_topic(self->handle, queue, serial, until, name));
	if (status != SHMQ_OK)
		return raise_status(self->state, status,
		                    status == SHMQ_BAD_NAME ? shmq_error_detail() : NULL,
		                    "name the dead topic of queue %u", queue);
	return PyUnicode_FromString(name);
}

static METHOD(broker, dead_move, (U32, queue)(U64, serial)(U32, topic)(U32, generation)(U32, n), )
{
	shmq_dead_target to = {.topic = topic, .generation = generation};
	uint32_t moved = 0;
	int status;

	BROKER_TRY(self, status,
	           shmq_dead_move(self->handle, queue, serial, &to, &(shmq_dead_wish){.n = n}, until,
	                          &moved));
	if (status == SHMQ_NEED_BACKLOG)
		Py_RETURN_NONE;
	if (status != SHMQ_OK && status != SHMQ_EMPTY)
		return raise_status(self->state, status, NULL, "move the dead letters of queue %u", queue);
	return PyLong_FromUnsignedLong(moved);
}

static METHOD(broker, topic_settings, (U32, topic)(U32, generation), )
{
	shmq_settings found;
	int status;

	BROKER_CALL(self, status, shmq_topic_settings(self->handle, topic, generation, until, &found));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "read the settings of topic %u", topic);
	return settings_tuple(&found);
}

static GETTER(broker, stopped)
{
	return PyBool_FromLong(self->handle && shmq_broker_stopped(self->handle));
}

#define X(name) METHOD_ROW(broker, Broker, name, FAST),
static PyMethodDef broker_methods[] = {
	METHOD_ROW(broker, Broker, supervisor_alive, METH_NOARGS),
	METHOD_ROW(broker, Broker, detach, FAST),
	METHOD_ROW(broker, Broker, view, FAST),
	METHOD_ROW(broker, Broker, find_topic, FAST),
	METHOD_ROW(broker, Broker, find_queue, FAST),
	METHOD_ROW(broker, Broker, request, FAST),
	METHOD_ROW(broker, Broker, pause_topic, FAST),
	METHOD_ROW(broker, Broker, pause_channel, FAST),
	METHOD_ROW(broker, Broker, empty, FAST),
	METHOD_ROW(broker, Broker, held_finish, FAST),
	METHOD_ROW(broker, Broker, held_requeue, FAST),
	METHOD_ROW(broker, Broker, dead_topic, FAST),
	METHOD_ROW(broker, Broker, dead_move, FAST),
	METHOD_ROW(broker, Broker, configure, FAST),
	METHOD_ROW(broker, Broker, configure_topic, FAST),
	METHOD_ROW(broker, Broker, settings, FAST),
	METHOD_ROW(broker, Broker, topic_settings, FAST),
	SUPERVISOR_METHODS(X) LEASE_METHODS(X) STORE_METHODS(X){NULL, NULL, 0, NULL},
};
#undef X

static PyGetSetDef broker_properties[] = {
	GETTER_ROW(broker, Broker, client),
	GETTER_ROW(broker, Broker, forked),
	GETTER_ROW(broker, Broker, stopped),
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef broker_members[] = {
	MEMBER_ROW(broker, Broker, closed, T_BOOL, closed),
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot broker_slots[] = {
	{Py_tp_doc, DOC_Broker},           {Py_tp_new, type_new},
	{Py_tp_init, broker_init},         {Py_tp_dealloc, broker_dealloc},
	{Py_tp_traverse, broker_traverse}, {Py_tp_clear, broker_clear},
	{Py_tp_methods, broker_methods},   {Py_tp_getset, broker_properties},
	{Py_tp_members, broker_members},   {0, NULL},
};

TYPE_SPEC(broker, Broker, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);

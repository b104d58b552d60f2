/*
 * _native.Intake: the input of one connection of nsqd's TCP protocol, as the event loop's transport
 * delivers it. While a client only publishes to one topic, the commands are published and answered
 * here; all other input is passed on to the connection.
 */
#include "types.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#define OK_FRAME "\0\0\0\6\0\0\0\0OK"
#define OK_BYTES (sizeof(OK_FRAME) - 1)
/* For how long the waiter's thread is woken for each message, if those who take them gather them
 * before they write: it finds more of them at once. */
#define GATHER_NS INT64_C(10000000)

static bool intake_usable(intake_object *self)
{
	if (self->on_input)
		return true;
	if (init_called(self->was_open, "Intake"))
		raise_status(self->state, SHMQ_CLOSED, NULL, "read a connection's input");
	return false;
}

static void intake_rest(intake_object *self)
{
	Py_CLEAR(self->room);
	Py_CLEAR(self->line);
	Py_CLEAR(self->producer);
}

/* Answer as many commands. Returns 0, or -1 with an exception. */
static int intake_answer(intake_object *self, uint32_t answers)
{
	char frames[BODIES_ON_STACK * OK_BYTES];
	size_t length = answers * OK_BYTES;
	PyObject *rest, *done;
	ssize_t sent;

	for (size_t at = 0; at < length; at += OK_BYTES)
		memcpy(frames + at, OK_FRAME, OK_BYTES);
	do
		sent = send(self->fd, frames, length, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	if (LIKELY(sent == (ssize_t)length))
		return 0;
	/* The client does not read, or has gone: the transport will find out. */
	sent = sent < 0 ? 0 : sent;
	rest = PyBytes_FromStringAndSize(frames + sent, (Py_ssize_t)length - (Py_ssize_t)sent);
	done = rest ? PyObject_CallFunctionObjArgs(self->on_unsent, rest, NULL) : NULL;
	Py_XDECREF(rest);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* Publish the first `nbytes` of the room. Returns how many answers the client gets; 0: they are not
 * whole commands to this topic, or cannot be published now; -1: with an exception. rung: of how many
 * queues, in `self->rung`, the waiter's consumers are to take. */
static int intake_publish(intake_object *self, uint64_t nbytes, uint32_t *rung)
{
	producer_object *producer = self->producer;
	uint64_t used = 0, first_id;
	uint32_t answers = 0, count;
	body_source source;
	int r = 0;

	if (source_open(&source, self->room, self->line) < 0)
		return -1;
	/* If the room is full, more has arrived, and the connection makes it larger. */
	if (nbytes < (uint64_t)source.data.len)
		wire_run(&source,
		         &(shmq_wire_input){.data = source.data.buf,
		                            .length = nbytes,
		                            .max_msg_size = self->max_msg_size,
		                            .max_body_size = self->max_body_size},
		         &used, &answers);
	if (used != nbytes)
		source.count = 0;
	count = source.count;
	Py_INCREF((PyObject *)producer);
	if (self->waiter && !self->waiter->closed && self->heard >= self->catch_at)
		shmq_waiter_catch(self->waiter->handle);
	r = source_publish(&source, producer, true, &(shmq_terms){0}, 0, &first_id);
	*rung = shmq_waiter_caught(self->rung);
	Py_DECREF((PyObject *)producer);
	if (UNLIKELY(r < 0)) {
		if (!PyErr_ExceptionMatches(self->state->error) && !PyErr_ExceptionMatches(PyExc_OSError))
			return -1;
		PyErr_Clear(); /* the connection tries again, and says why it cannot */
		return 0;
	}
	if (!count)
		return 0;
	self->published += count;
	self->heard = shmq_now();
	return (int)answers;
}

/* Let the consumers of this process take what was published. Returns 0, or -1 with an exception. */
static int intake_deliver(intake_object *self, uint32_t count, PyObject *on_rung)
{
	PyObject *queues = list_of_numbers(self->rung, count);
	PyObject *done = queues ? PyObject_CallFunctionObjArgs(on_rung, queues, NULL) : NULL;

	Py_XDECREF(queues);
	if (!done)
		return -1;
	if (done == Py_True)
		self->catch_at = self->heard + GATHER_NS;
	Py_DECREF(done);
	return 0;
}

/* Returns 1 if all was published and answered, 0 if nothing was, -1 with an exception. */
static int intake_take(intake_object *self, PyObject *nbytes)
{
	uint64_t size = PyLong_AsUnsignedLongLong(nbytes);
	waiter_object *waiter = self->waiter; /* calls from here may close the intake */
	PyObject *on_rung = self->on_rung;
	uint32_t rung = 0;
	int answers;

	if (size == (uint64_t)-1 && PyErr_Occurred())
		return -1;
	Py_XINCREF((PyObject *)waiter);
	Py_XINCREF(on_rung);
	answers = self->producer ? intake_publish(self, size, &rung) : 0;
	if (answers > 0 && intake_answer(self, (uint32_t)answers) < 0)
		answers = -1;
	if (rung && answers <= 0)
		shmq_waiter_wake(waiter->handle); /* its own thread looks instead */
	else if (rung && intake_deliver(self, rung, on_rung) < 0)
		answers = -1;
	Py_XDECREF((PyObject *)waiter);
	Py_XDECREF(on_rung);
	return answers > 0 ? 1 : answers;
}

static ARGUMENT_METHOD(intake, publishes, nbytes)
{
	int r = intake_usable(self) ? intake_take(self, nbytes) : -1;

	return r < 0 ? NULL : PyBool_FromLong(r);
}

static ARGUMENT_METHOD(intake, buffer_updated, nbytes)
{
	int r = intake_usable(self) ? intake_take(self, nbytes) : -1;

	if (r < 0)
		return NULL;
	if (LIKELY(r))
		Py_RETURN_NONE;
	return PyObject_CallFunctionObjArgs(self->on_input, nbytes, NULL);
}

static ARGUMENT_METHOD(intake, get_buffer, hint)
{
	if (LIKELY(self->room != NULL))
		return Py_NewRef(self->room);
	return intake_usable(self) ? PyObject_CallFunctionObjArgs(self->on_room, hint, NULL) : NULL;
}

/* clang-format off */
static METHOD(intake, begin,
              (INT, fd)(OBJECT, room)(OBJECT, producer)(OBJECT, line)
              (U64, max_msg_size)(U64, max_body_size), )
/* clang-format on */
{
	if (!intake_usable(self))
		return NULL;
	if (!PyObject_TypeCheck(producer, self->state->producer) || !PyBytes_Check(line) ||
	    PyBytes_Size(line) < 2)
		return PyErr_Format(PyExc_TypeError, "begin() needs a Producer and the line of an MPUB");
	intake_rest(self);
	self->fd = fd;
	self->room = Py_NewRef(room);
	self->producer = (producer_object *)Py_NewRef(producer);
	self->line = Py_NewRef(line);
	self->max_msg_size = max_msg_size;
	self->max_body_size = max_body_size;
	Py_RETURN_NONE;
}

static NOARGS_METHOD(intake, end)
{
	uint64_t published = self->published;

	self->published = 0;
	intake_rest(self);
	return Py_BuildValue("(Kd)", (unsigned long long)published,
	                     (double)self->heard / (double)SECOND_NS);
}

/* ---- life ----------------------------------------------------------------------------------- */

static int intake_clear(intake_object *self)
{
	intake_rest(self);
	Py_CLEAR(self->on_room);
	Py_CLEAR(self->on_input);
	Py_CLEAR(self->on_unsent);
	Py_CLEAR(self->on_rung);
	Py_CLEAR(self->waiter);
	return 0;
}

static NOARGS_METHOD(intake, close)
{
	intake_clear(self);
	Py_RETURN_NONE;
}

static INIT(intake)
{
	static char *names[] = {"on_room", "on_input", "on_unsent", "waiter", "on_rung", NULL};
	PyObject *on_room, *on_input, *on_unsent, *on_rung = NULL;
	waiter_object *waiter = NULL;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|O!O:Intake", names, &on_room, &on_input,
	                                 &on_unsent, self->state->waiter, &waiter, &on_rung))
		return -1;
	if (waiter && (!waiter->handle || !on_rung)) {
		PyErr_SetString(PyExc_TypeError, "Intake() needs on_rung with an open waiter");
		return -1;
	}
	if (!init_first(self->was_open, "Intake"))
		return -1;
	self->was_open = true;
	self->on_room = Py_NewRef(on_room);
	self->on_input = Py_NewRef(on_input);
	self->on_unsent = Py_NewRef(on_unsent);
	if (waiter) {
		self->waiter = (waiter_object *)Py_NewRef((PyObject *)waiter);
		self->on_rung = Py_NewRef(on_rung);
	}
	return 0;
}

static DEALLOC(intake)
{
	PyObject_GC_UnTrack(self);
	intake_clear(self);
	object_free((PyObject *)self);
}

static int intake_traverse(intake_object *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE((PyObject *)self));
	Py_VISIT(self->on_room);
	Py_VISIT(self->on_input);
	Py_VISIT(self->on_unsent);
	Py_VISIT(self->on_rung);
	Py_VISIT((PyObject *)self->waiter);
	Py_VISIT(self->room);
	Py_VISIT(self->producer);
	return 0;
}

static PyMethodDef intake_methods[] = {
	METHOD_ROW(intake, Intake, get_buffer, METH_O),
	METHOD_ROW(intake, Intake, buffer_updated, METH_O),
	METHOD_ROW(intake, Intake, publishes, METH_O),
	METHOD_ROW(intake, Intake, begin, FAST),
	METHOD_ROW(intake, Intake, end, METH_NOARGS),
	METHOD_ROW(intake, Intake, close, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};

static PyType_Slot intake_slots[] = {
	{Py_tp_doc, DOC_Intake},           {Py_tp_new, type_new},
	{Py_tp_init, intake_init},         {Py_tp_dealloc, intake_dealloc},
	{Py_tp_traverse, intake_traverse}, {Py_tp_clear, intake_clear},
	{Py_tp_methods, intake_methods},   {0, NULL},
};

TYPE_SPEC(intake, Intake, Py_TPFLAGS_HAVE_GC);

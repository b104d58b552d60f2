/* _native.Spill: a batch of messages on its way to disk. */
#include "module.h"

typedef struct spill_object {
	PyObject_HEAD
	broker_object *broker;
	shmq_spill spill;
	PyObject *lengths, *positions; /* memoryviews of bytearrays that spill's pointers lie in */
	bool ended;
} spill_object;

/* memoryview(bytearray(bytes)).cast(format); *memory: its first byte. */
static PyObject *column_new(Py_ssize_t bytes, const char *format, void *memory)
{
	PyObject *array = PyByteArray_FromStringAndSize(NULL, bytes);
	PyObject *plain = array ? PyMemoryView_FromObject(array) : NULL;
	PyObject *view = plain ? PyObject_CallMethod(plain, "cast", "s", format) : NULL;

	if (view)
		*(char **)memory = PyByteArray_AsString(array);
	Py_XDECREF(array);
	Py_XDECREF(plain);
	return view;
}

static int spill_give_back(spill_object *self, int64_t until)
{
	int status = shmq_spill_end(self->broker->handle, &self->spill, 0, false, until);

	self->ended = status != SHMQ_AGAIN;
	return status;
}

PyObject *spill_new(broker_object *broker, shmq_spill *spill)
{
	spill_object *self = PyObject_New(spill_object, broker->state->spill);
	uint32_t *lengths = spill->lengths;
	uint64_t *positions = spill->positions; /* the caller's, or none yet */

	if (!self) {
		shmq_spill_end(broker->handle, spill, 0, false, shmq_now() + LOCK_SLICE_NS);
		PyMem_Free(spill->slots);
		PyMem_Free(spill->lengths);
		return NULL;
	}
	self->broker = (broker_object *)Py_NewRef((PyObject *)broker);
	self->spill = *spill;
	self->ended = false;
	self->lengths = column_new(4 * (Py_ssize_t)spill->count, "I", &self->spill.lengths);
	self->positions = column_new(8 * (Py_ssize_t)spill->count, "Q", &self->spill.positions);
	if (!self->lengths || !self->positions) {
		Py_DECREF((PyObject *)self);
		self = NULL;
	} else {
		for (uint32_t i = 0; i < spill->count; i++) {
			self->spill.lengths[i] = lengths[i];
			self->spill.positions[i] = positions ? positions[i] : 0;
		}
	}
	PyMem_Free(lengths);
	return (PyObject *)self;
}

static void spill_dealloc(spill_object *self)
{
	if (!self->ended && self->broker->handle)
		spill_give_back(self, shmq_now() + LOCK_SLICE_NS);
	PyMem_Free(self->spill.slots);
	Py_XDECREF(self->lengths);
	Py_XDECREF(self->positions);
	Py_DECREF((PyObject *)self->broker);
	object_free((PyObject *)self);
}

static bool spill_usable(spill_object *self)
{
	if (self->ended)
		PyErr_SetString(PyExc_RuntimeError, "this Spill has ended; begin another one");
	return !self->ended && broker_usable(self->broker, "write messages to disk");
}

static PyObject *spill_encode(spill_object *self, PyObject *unused)
{
	PyObject *records;
	char *buffer;
	int status;

	(void)unused;
	if (!spill_usable(self))
		return NULL;
	records = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->spill.bytes);
	if (!records)
		return NULL;
	buffer = PyBytes_AsString(records);
	CORE_WAIT(self->broker, status, FOR_EVER, 0,
	          ((void)until, shmq_spill_encode(self->broker->handle, &self->spill, buffer)));
	if (status == SHMQ_OK)
		return records;
	Py_DECREF(records);
	return raise_status(self->broker->state, status, NULL, "encode messages of queue %u",
	                    self->spill.queue);
}

static PyObject *spill_end(spill_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	uint64_t write_position;
	bool ok;
	int status;

	if (ARGUMENTS("end", 2, {"write_position", ARGUMENT_U64, &write_position},
	              {"ok", ARGUMENT_BOOL, &ok}) < 0 ||
	    !spill_usable(self))
		return NULL;
	BROKER_CALL(self->broker, status,
	            shmq_spill_end(self->broker->handle, &self->spill, write_position, ok, until));
	if (status == CORE_RAISED)
		return NULL;
	self->ended = true;
	if (status != SHMQ_OK && status != SHMQ_GONE)
		return raise_status(self->broker->state, status, NULL, "end the spill of queue %u",
		                    self->spill.queue);
	return PyBool_FromLong(status == SHMQ_OK);
}

static PyObject *spill_count(spill_object *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(self->spill.count);
}

static PyObject *spill_position(spill_object *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(self->spill.position);
}

static PyObject *spill_bytes(spill_object *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(self->spill.bytes);
}

static PyMethodDef spill_methods[] = {
	METHOD("encode", spill_encode, METH_NOARGS,
	       "encode($self)\n--\n\nThe records, one after the other."),
	METHOD("end", spill_end, FAST,
	       "end($self, write_position, ok)\n--\n\nStore the write position, free the slots."),
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef spill_properties[] = {
	{"count", (getter)spill_count, NULL, "How many messages.", NULL},
	{"bytes", (getter)spill_bytes, NULL, "Of all records.", NULL},
	{"lengths", object_get, NULL, "Of each record, uint32.",
	 (void *)offsetof(spill_object, lengths)},
	{"positions", object_get, NULL,
	 "Where each record will be, uint64; to be filled. Of a chunk: due times.",
	 (void *)offsetof(spill_object, positions)},
	{"position", (getter)spill_position, NULL, "Ahead: of the first record. Of a chunk: its number.",
	 NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot spill_slots[] = {
	{Py_tp_doc, "Messages on their way to disk."},
	{Py_tp_dealloc, spill_dealloc},
	{Py_tp_methods, spill_methods},
	{Py_tp_getset, spill_properties},
	{0, NULL},
};

PyType_Spec spill_spec = {
	.name = "shmq._native.Spill",
	.basicsize = sizeof(spill_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = spill_slots,
};

/* _native.Spill: messages that are being written to disk. */
#include "types.h"

typedef struct spill_object {
	PyObject_HEAD
	broker_object *broker;
	shmq_spill spill;
	PyObject *lengths, *positions; /* memoryviews of bytearrays; spill's pointers point into them */
	bool ended;
} spill_object;

/* memoryview(bytearray(bytes)).cast(format); *memory becomes the address of its first byte. */
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

bool spill_room(shmq_spill *spill, uint32_t queue, uint32_t n, bool chunk)
{
	*spill = (shmq_spill){.queue = queue};
	spill->slots = PyMem_Calloc(n + !n, sizeof(*spill->slots));
	spill->lengths = PyMem_Calloc(n + !n, sizeof(*spill->lengths));
	if (chunk)
		spill->positions = PyMem_Calloc(n + !n, sizeof(*spill->positions));
	if (spill->slots && spill->lengths && (spill->positions || !chunk))
		return true;
	spill_room_free(spill);
	PyErr_NoMemory();
	return false;
}

void spill_room_free(shmq_spill *spill)
{
	PyMem_Free(spill->slots);
	PyMem_Free(spill->lengths);
	PyMem_Free(spill->positions);
}

PyObject *spill_new(broker_object *broker, shmq_spill *spill)
{
	spill_object *self = PyObject_New(spill_object, broker->state->spill);

	if (!self) {
		shmq_spill_end(broker->handle, spill, 0, false, shmq_now() + LOCK_SLICE_NS);
		spill_room_free(spill);
		return NULL;
	}
	self->broker = (broker_object *)Py_NewRef((PyObject *)broker);
	self->spill = *spill;
	self->ended = false;
	self->lengths = column_new(4 * (Py_ssize_t)spill->count, "I", &self->spill.lengths);
	self->positions = column_new(8 * (Py_ssize_t)spill->count, "Q", &self->spill.positions);
	if (!self->lengths || !self->positions) {
		Py_CLEAR(self);
	} else {
		for (uint32_t i = 0; i < spill->count; i++) {
			self->spill.lengths[i] = spill->lengths[i];
			self->spill.positions[i] = spill->positions ? spill->positions[i] : 0;
		}
	}
	PyMem_Free(spill->lengths);
	PyMem_Free(spill->positions);
	return (PyObject *)self;
}

static DEALLOC(spill)
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

static NOARGS_METHOD(spill, encode)
{
	PyObject *records;
	char *buffer;
	int status;

	if (!spill_usable(self))
		return NULL;
	records = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->spill.bytes);
	if (!records)
		return NULL;
	buffer = PyBytes_AsString(records);
	CORE_WAIT(self->broker, status, FOR_EVER, 0,
	          shmq_spill_encode(self->broker->handle, &self->spill, buffer));
	if (status == SHMQ_OK)
		return records;
	Py_DECREF(records);
	return raise_status(self->broker->state, status, NULL, "encode messages of queue %u",
	                    self->spill.queue);
}

static METHOD(spill, end, (U64, write_position)(BOOL, ok), )
{
	int status;

	if (!spill_usable(self))
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

static PyMethodDef spill_methods[] = {
	METHOD_ROW(spill, Spill, encode, METH_NOARGS),
	METHOD_ROW(spill, Spill, end, FAST),
	{NULL, NULL, 0, NULL},
};

static PyMemberDef spill_members[] = {
	MEMBER_ROW(spill, Spill, count, T_UINT, spill.count),
	MEMBER_ROW(spill, Spill, bytes, T_ULONGLONG, spill.bytes),
	MEMBER_ROW(spill, Spill, position, T_ULONGLONG, spill.position),
	MEMBER_ROW(spill, Spill, lengths, T_OBJECT, lengths),
	MEMBER_ROW(spill, Spill, positions, T_OBJECT, positions),
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot spill_slots[] = {
	{Py_tp_doc, DOC_Spill},
	{Py_tp_dealloc, spill_dealloc},
	{Py_tp_methods, spill_methods},
	{Py_tp_members, spill_members},
	{0, NULL},
};

TYPE_SPEC(spill, Spill, Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE);

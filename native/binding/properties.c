/* Properties of messages: mappings of Python to blocks of the core, and back. */
#define PY_SSIZE_T_CLEAN
#include "types.h"

#include <string.h>

/* ---- to a block ----------------------------------------------------------------------------- */

/* The bytes of a value: those of a bytes object, of a str as UTF-8, or of a buffer. view: to be
 * released by the caller. Returns 0, or -1 with an exception. */
static int value_of(PyObject *name, PyObject *value, Py_buffer *view, shmq_property *p)
{
	const char *data;
	Py_ssize_t length;

	view->obj = NULL;
	if (PyUnicode_Check(value)) {
		data = PyUnicode_AsUTF8AndSize(value, &length);
		if (!data)
			return -1;
	} else if (PyObject_CheckBuffer(value)) {
		if (PyObject_GetBuffer(value, view, PyBUF_SIMPLE) < 0)
			return -1;
		data = view->buf;
		length = view->len;
	} else {
		PyErr_Format(PyExc_TypeError, "the property %R must be str or bytes, not %R", name, value);
		return -1;
	}
	p->value = data;
	p->length = length > UINT32_MAX ? UINT32_MAX : (uint32_t)length; /* either is too long */
	return 0;
}

static int entry_add(module_state *state, PyObject *name, PyObject *value, uint8_t *block,
                     uint64_t *length)
{
	shmq_property p = {0};
	Py_buffer view;
	Py_ssize_t size;
	int status;

	if (!PyUnicode_Check(name)) {
		PyErr_Format(PyExc_TypeError, "the name of a property must be str, not %R", name);
		return -1;
	}
	p.name = PyUnicode_AsUTF8AndSize(name, &size);
	if (!p.name)
		return -1;
	p.name_length = size > UINT16_MAX ? UINT16_MAX : (uint32_t)size;
	if (value_of(name, value, &view, &p) < 0)
		return -1;
	status = shmq_property_add(block, length, &p);
	if (view.obj)
		PyBuffer_Release(&view);
	if (status == SHMQ_OK)
		return 0;
	raise_status(state, status, NULL, "set properties");
	return -1;
}

int properties_pack(module_state *state, PyObject *mapping, uint8_t block[SHMQ_PROPERTIES_MOST],
                    uint64_t *length)
{
	PyObject *items;
	int r = 0;

	*length = 0;
	if (mapping == Py_None)
		return 0;
	items = PyMapping_Check(mapping) ? PyMapping_Items(mapping) : NULL;
	if (!items) {
		if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_AttributeError))
			PyErr_Format(PyExc_TypeError,
			             "properties must be a mapping of names to str or bytes, not %R", mapping);
		return -1;
	}
	for (Py_ssize_t i = 0; !r && i < PyList_Size(items); i++) {
		PyObject *item = PyList_GetItem(items, i);

		if (PyTuple_Check(item) && PyTuple_Size(item) == 2) {
			r = entry_add(state, PyTuple_GetItem(item, 0), PyTuple_GetItem(item, 1), block, length);
		} else {
			PyErr_Format(PyExc_TypeError, "items() of properties must give pairs, not %R", item);
			r = -1;
		}
	}
	Py_DECREF(items);
	return r;
}

METHOD(native, pack_properties, (OBJECT, properties), )
{
	uint8_t block[SHMQ_PROPERTIES_MOST];
	uint64_t length;

	if (properties_pack(PyModule_GetState(self), properties, block, &length) < 0)
		return NULL;
	return PyBytes_FromStringAndSize((const char *)block, (Py_ssize_t)length);
}

/* ---- from a block --------------------------------------------------------------------------- */

PyObject *properties_unpack(module_state *state, const void *block, uint64_t length)
{
	PyObject *dict = PyDict_New(), *proxy;
	shmq_property p;
	uint64_t at = 0;
	int r = dict ? 1 : 0;

	while (dict && (r = shmq_property_next(block, length, &at, &p)) > 0) {
		PyObject *name = PyUnicode_FromStringAndSize(p.name, p.name_length);
		PyObject *value = PyBytes_FromStringAndSize(p.value, (Py_ssize_t)p.length);

		if (!name || !value || PyDict_SetItem(dict, name, value) < 0)
			Py_CLEAR(dict);
		Py_XDECREF(name);
		Py_XDECREF(value);
	}
	if (dict && r < 0) {
		Py_CLEAR(dict);
		raise_status(state, SHMQ_CORRUPT, "something has overwritten them in shared memory",
		             "read properties");
	}
	if (!dict)
		return NULL;
	proxy = PyDictProxy_New(dict);
	Py_DECREF(dict);
	return proxy;
}

METHOD(native, unpack_properties, (OBJECT, block), )
{
	Py_buffer view;
	PyObject *proxy;

	if (PyObject_GetBuffer(block, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	proxy = properties_unpack(PyModule_GetState(self), view.buf, (uint64_t)view.len);
	PyBuffer_Release(&view);
	return proxy;
}

/* ---- blocks of a batch ---------------------------------------------------------------------- */

/* One block, or one for each of n messages. */
int property_blocks_open(property_blocks *self, PyObject *packed, Py_ssize_t n)
{
	bool one = PyBytes_Check(packed);

	*self = (property_blocks){0};
	if (packed == Py_None || (one && !PyBytes_Size(packed)))
		return 0;
	self->keep = one ? Py_NewRef(packed) : PySequence_Tuple(packed);
	if (!self->keep)
		return -1;
	if (!one && PyTuple_Size(self->keep) != n) {
		PyErr_Format(PyExc_ValueError, "there are %zd properties for %zd messages",
		             PyTuple_Size(self->keep), n);
		goto failed;
	}
	self->blocks = PyMem_Malloc((size_t)(n + 1) * sizeof(*self->blocks));
	if (!self->blocks) {
		PyErr_NoMemory();
		goto failed;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *block = one ? packed : PyTuple_GetItem(self->keep, i);
		Py_ssize_t length;
		char *data;

		if (PyBytes_AsStringAndSize(block, &data, &length) < 0)
			goto failed;
		self->blocks[i] = (shmq_body){data, (uint64_t)length};
	}
	return 0;
failed:
	property_blocks_close(self);
	return -1;
}

void property_blocks_close(property_blocks *self)
{
	PyMem_Free(self->blocks);
	Py_CLEAR(self->keep);
	self->blocks = NULL;
}

PyObject *blocks_new(uint32_t count, uint64_t size, shmq_blocks *to)
{
	PyObject *offsets = PyBytes_FromStringAndSize(
			NULL, (Py_ssize_t)((count + (size_t)1) * sizeof(*to->offsets)));
	PyObject *blocks = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	PyObject *pair = offsets && blocks ? PyTuple_Pack(2, offsets, blocks) : NULL;

	if (pair) {
		to->offsets = (int32_t *)(void *)PyBytes_AsString(offsets);
		to->blocks = (uint8_t *)PyBytes_AsString(blocks);
	}
	Py_XDECREF(offsets);
	Py_XDECREF(blocks);
	return pair;
}

/* ---- of records and slots ------------------------------------------------------------------- */

METHOD(native, record_properties, (OBJECT, records)(U32, count), )
{
	PyObject *pair = NULL;
	shmq_blocks to;
	uint64_t size;
	Py_buffer view;
	int status;

	if (PyObject_GetBuffer(records, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	status = shmq_records_properties(view.buf, (uint64_t)view.len, count, &size, NULL);
	if (status == SHMQ_OK && (pair = blocks_new(count, size, &to)))
		status = shmq_records_properties(view.buf, (uint64_t)view.len, count, &size, &to);
	PyBuffer_Release(&view);
	if (status == SHMQ_OK)
		return pair;
	Py_XDECREF(pair);
	return raise_status(PyModule_GetState(self), status, NULL,
	                    "read the properties of %u disk records", count);
}

METHOD(native, split_body, (OBJECT, body), )
{
	shmq_body block, rest;
	PyObject *result;
	Py_buffer view;

	(void)self;
	if (PyObject_GetBuffer(body, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	shmq_record_split(view.buf, (uint64_t)view.len, &block, &rest);
	result = Py_BuildValue("(y#y#)", block.data, (Py_ssize_t)block.length, rest.data,
	                       (Py_ssize_t)rest.length);
	PyBuffer_Release(&view);
	return result;
}

METHOD(native, encode_slot, (OBJECT, slot)(OBJECT, content)(OBJECT, topic)(OBJECT, key), )
{
	Py_buffer image, bytes;
	PyObject *record = NULL;
	const char *name = PyUnicode_AsUTF8AndSize(topic, NULL);
	const uint8_t *secret = NULL;
	uint64_t size;

	(void)self;
	if (!name)
		return NULL;
	if (PyBytes_Check(key) && PyBytes_Size(key) == SHMQ_SEAL_KEY)
		secret = (const uint8_t *)PyBytes_AsString(key);
	else if (key != Py_None)
		return PyErr_Format(PyExc_TypeError, "encode_slot() needs a key of %d bytes, or None",
		                    SHMQ_SEAL_KEY);
	if (PyObject_GetBuffer(slot, &image, PyBUF_SIMPLE) < 0)
		return NULL;
	if (PyObject_GetBuffer(content, &bytes, PyBUF_SIMPLE) < 0) {
		PyBuffer_Release(&image);
		return NULL;
	}
	if ((uint64_t)image.len != shmq_layout_size("slot")) {
		PyErr_SetString(PyExc_ValueError, "encode_slot() needs the bytes of one slot");
	} else {
		size = shmq_slot_record(image.buf, bytes.buf, (uint64_t)bytes.len, secret, name, NULL);
		record = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	}
	if (record)
		(void)shmq_slot_record(image.buf, bytes.buf, (uint64_t)bytes.len, secret, name,
		                       PyBytes_AsString(record));
	PyBuffer_Release(&bytes);
	PyBuffer_Release(&image);
	return record;
}

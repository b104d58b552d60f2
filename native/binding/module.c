#include "types.h"

#include <string.h>

#ifndef SHMQ_VERSION
#error "SHMQ_VERSION must be defined: the version in pyproject.toml"
#endif

/* ---- functions ------------------------------------------------------------------------------ */

#define NUMBER_FUNCTION(name, number)                                                              \
	static PyObject *native_##name(PyObject *self, PyObject *unused)                               \
	{                                                                                              \
		(void)self, (void)unused;                                                                  \
		return Py_BuildValue("L", (long long)(number));                                            \
	}
NUMBER_FUNCTION(now, shmq_now())
NUMBER_FUNCTION(realtime, shmq_realtime())
NUMBER_FUNCTION(fork_generation, shmq_fork_generation())
NUMBER_FUNCTION(directory_bytes, shmq_directory_bytes())

static PyObject *native_fingerprint(PyObject *self, PyObject *unused)
{
	(void)self, (void)unused;
	return PyLong_FromUnsignedLongLong(shmq_layout_fingerprint());
}

static PyObject *native_name_valid(PyObject *module, PyObject *name)
{
	const char *text;
	Py_ssize_t length;

	(void)module;
	if (!PyUnicode_Check(name))
		return PyErr_Format(PyExc_TypeError, "name_valid() needs a str, not %R", name);
	text = PyUnicode_AsUTF8AndSize(name, &length);
	if (!text) { /* it has lone surrogates */
		PyErr_Clear();
		return PyBool_FromLong(0);
	}
	return PyBool_FromLong(shmq_name_valid(text, (size_t)length));
}

static PyObject *native_create_directory(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                         PyObject *kwnames)
{
	shmq_limits limits = {0};
	Py_ssize_t length;
	char *key = NULL;
	int status, fd;

	if (nargs != 1 && nargs != 2)
		return PyErr_Format(PyExc_TypeError,
		                    "create_directory() takes fd, key or none, and eight keywords");
	if (nargs == 2 && PyBytes_AsStringAndSize(args[1], &key, &length) < 0)
		return NULL;
	if (key && length != SHMQ_SEAL_KEY)
		return PyErr_Format(PyExc_ValueError, "create_directory() needs a key of %d bytes, not %zd",
		                    SHMQ_SEAL_KEY, length);
	fd = (int)PyLong_AsLong(args[0]);
	if (PyErr_Occurred() || limits_parse("create_directory", args + nargs, 0, kwnames, &limits) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	status = shmq_directory_create(fd, &limits, (const uint8_t *)key);
	Py_END_ALLOW_THREADS
	if (status != SHMQ_OK)
		return raise_status(PyModule_GetState(module), status, NULL, "create the directory");
	Py_RETURN_NONE;
}

static METHOD(native, queue_bytes, (U64, arena_size)(U32, mem_queue_size)(U32, in_flight_slots), )
{
	const shmq_limits limits = {.arena_size = arena_size,
	                            .mem_queue_size = mem_queue_size,
	                            .in_flight_slots = in_flight_slots};

	(void)self;
	return PyLong_FromUnsignedLongLong(shmq_queue_bytes(&limits));
}

static METHOD(native, decode_records, (OBJECT, records)(U32, count), )
{
	PyObject *result = NULL;
	Py_buffer view;
	int64_t bodies;
	columns out;
	int status;

	if (PyObject_GetBuffer(records, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	bodies = (int64_t)view.len - (int64_t)SHMQ_RECORD_HEAD * count;
	if (bodies < 0) {
		PyErr_Format(PyExc_ValueError, "%zd bytes are not %u records", view.len, count);
	} else if (columns_new(&out, count, (uint64_t)bodies) == 0) {
		Py_BEGIN_ALLOW_THREADS
		status = shmq_records_decode(view.buf, (uint64_t)view.len, count, &out.at);
		Py_END_ALLOW_THREADS
		if (status == SHMQ_OK && columns_shorten(&out, count) == 0)
			result = PyTuple_Pack(COLUMNS, out.bytes[COLUMN_IDS], out.bytes[COLUMN_TIMESTAMPS],
			                      out.bytes[COLUMN_ATTEMPTS], out.bytes[COLUMN_OFFSETS],
			                      out.bytes[COLUMN_DATA]);
		else if (status != SHMQ_OK)
			raise_status(PyModule_GetState(self), status, NULL, "decode %u disk records", count);
		columns_free(&out);
	}
	PyBuffer_Release(&view);
	return result;
}

static METHOD(native, scan_records, (OBJECT, data)(U64, max_msg_size), (U32, most, UINT32_MAX))
{
	uint32_t records = 0;
	uint64_t used = 0;
	bool damaged = false;
	Py_buffer view;
	int status;

	if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	status = shmq_records_scan(view.buf, (uint64_t)view.len, max_msg_size, most, &records, &used,
	                           &damaged);
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&view);
	if (status != SHMQ_OK)
		return raise_status(PyModule_GetState(self), status, NULL, "scan disk records");
	return Py_BuildValue("(IKO)", records, (unsigned long long)used, damaged ? Py_True : Py_False);
}

static METHOD(native, leasable_records, (OBJECT, data)(U64, max_bytes)(BOOL, at_least), )
{
	uint64_t bytes = 0, used = 0;
	uint32_t records = 0;
	Py_buffer view;

	(void)self;
	if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	shmq_records_leasable(view.buf, (uint64_t)view.len, max_bytes, at_least, &records, &bytes,
	                      &used);
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&view);
	return Py_BuildValue("(IKK)", records, (unsigned long long)bytes, (unsigned long long)used);
}

static METHOD(native, has_pages, (OBJECT, segment)(U64, at)(U64, nbytes), )
{
	Py_buffer view;
	bool has;

	(void)self;
	if (PyObject_GetBuffer(segment, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	has = at <= (uint64_t)view.len && nbytes <= (uint64_t)view.len - at;
	if (has) {
		Py_BEGIN_ALLOW_THREADS
		has = shmq_segment_has_pages(view.buf, at, nbytes);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&view);
	return PyBool_FromLong(has);
}

#ifdef SHMQ_KILLPOINTS
static METHOD(native, killpoint, (TEXT_OR_NONE, name), (U32, count, 1))
{
	(void)self;
	shmq_killpoint_arm(name, count);
	Py_RETURN_NONE;
}
#endif

#define FUNCTION_ROW(name, flags)                                                                  \
	{#name, (PyCFunction)(void (*)(void))native_##name, flags, DOC_##name}
static PyMethodDef functions[] = {
	FUNCTION_ROW(now, METH_NOARGS),
	FUNCTION_ROW(realtime, METH_NOARGS),
	FUNCTION_ROW(fork_generation, METH_NOARGS),
	FUNCTION_ROW(name_valid, METH_O),
	FUNCTION_ROW(fingerprint, METH_NOARGS),
	FUNCTION_ROW(directory_bytes, METH_NOARGS),
	FUNCTION_ROW(create_directory, FAST),
	FUNCTION_ROW(queue_bytes, FAST),
	FUNCTION_ROW(scan_bodies, FAST),
	FUNCTION_ROW(decode_records, FAST),
	FUNCTION_ROW(scan_records, FAST),
	FUNCTION_ROW(leasable_records, FAST),
	FUNCTION_ROW(pack_properties, FAST),
	FUNCTION_ROW(unpack_properties, FAST),
	FUNCTION_ROW(record_properties, FAST),
	FUNCTION_ROW(split_body, FAST),
	FUNCTION_ROW(encode_slot, FAST),
	FUNCTION_ROW(has_pages, FAST),
	FUNCTION_ROW(reopen_store, FAST),
#ifdef SHMQ_KILLPOINTS
	FUNCTION_ROW(killpoint, FAST),
#endif
	{NULL, NULL, 0, NULL},
};

/* ---- tables --------------------------------------------------------------------------------- */

/* dict[key] = value, and drop the reference to value. Returns -1 also if value is NULL. */
static int put(PyObject *dict, const char *key, PyObject *value)
{
	int r = value ? PyDict_SetItemString(dict, key, value) : -1;

	Py_XDECREF(value);
	return r;
}

static PyObject *inner(PyObject *layout, const char *structure)
{
	PyObject *name = PyUnicode_FromString(structure);
	PyObject *fields = name ? PyDict_GetItemWithError(layout, name) : NULL;

	if (name && !fields && !PyErr_Occurred() && put(layout, structure, PyDict_New()) == 0)
		fields = PyDict_GetItemWithError(layout, name);
	Py_XDECREF(name);
	return fields; /* borrowed */
}

static int fill_layout(PyObject *layout)
{
	size_t count;
	const shmq_field *field = shmq_layout(&count);

	for (; count; count--, field++) {
		PyObject *fields = inner(layout, field->structure);

		if (!fields ||
		    put(fields, field->name,
		        Py_BuildValue("(sIII)", field->dtype, field->offset, field->size, field->count)))
			return -1;
	}
	return 0;
}

static int fill_sizes(PyObject *sizes)
{
	size_t count;
	const shmq_field *field = shmq_layout(&count);

	for (; count; count--, field++) {
		if (put(sizes, field->structure,
		        PyLong_FromUnsignedLong(shmq_layout_size(field->structure))))
			return -1;
	}
	return 0;
}

static int fill_constants(PyObject *constants)
{
	size_t count;
	const shmq_constant *constant = shmq_constants(&count);

	for (; count; count--, constant++) {
		if (put(constants, constant->name, PyLong_FromLongLong(constant->value)))
			return -1;
	}
	return 0;
}

uint32_t constant_of(const char *name)
{
	size_t count;
	const shmq_constant *constant = shmq_constants(&count);

	for (; count; count--, constant++) {
		if (strcmp(constant->name, name) == 0)
			return (uint32_t)constant->value;
	}
	return 0;
}

static int fill_status(PyObject *statuses)
{
	static const struct {
		const char *name;
		int value;
		const char *exception, *sentence;
	} rows[] = {
#define X(name, value, exception, sentence) {#name, value, exception, sentence},
		SHMQ_STATUS_TABLE(X)
#undef X
	};

	for (int i = 0; i < STATUSES; i++) {
		if (put(statuses, rows[i].name,
		        Py_BuildValue("(iss)", rows[i].value, rows[i].exception, rows[i].sentence)))
			return -1;
	}
	return 0;
}

static int add_table(PyObject *module, const char *name, int (*fill)(PyObject *table))
{
	PyObject *table = PyDict_New();
	int r = table && fill(table) == 0 ? PyModule_AddObjectRef(module, name, table) : -1;

	Py_XDECREF(table);
	return r;
}

static int add_tables(PyObject *module)
{
	if (add_table(module, "LAYOUT", fill_layout) < 0 ||
	    add_table(module, "SIZES", fill_sizes) < 0 ||
	    add_table(module, "CONSTANTS", fill_constants) < 0)
		return -1;
	return add_table(module, "STATUS", fill_status);
}

static int add_numbers(PyObject *module)
{
#ifdef SHMQ_KILLPOINTS
	PyObject *killpoints = Py_True;
#else
	PyObject *killpoints = Py_False;
#endif

	if (PyModule_AddObjectRef(module, "KILLPOINTS", killpoints) < 0 ||
	    PyModule_AddIntConstant(module, "LAYOUT_VERSION", (long)shmq_layout_version()) < 0)
		return -1;
	return PyModule_AddStringConstant(module, "__version__", SHMQ_VERSION);
}

/* ---- types ---------------------------------------------------------------------------------- */

static PyModuleDef definition;

#ifdef Py_GIL_DISABLED
PyObject guard_object[1] = {PyObject_HEAD_INIT(&PyBaseObject_Type)};
#endif

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
	*type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
	return *type ? PyModule_AddType(module, *type) : -1;
}

module_state *state_of(PyTypeObject *type)
{
	for (; type; type = PyType_GetSlot(type, Py_tp_base)) {
		PyObject *module = PyType_GetModule(type);

		if (module && PyModule_GetDef(module) == &definition)
			return PyModule_GetState(module);
		PyErr_Clear();
	}
	PyErr_SetString(PyExc_SystemError, "not a type of shmq._native");
	return NULL;
}

PyObject *type_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	module_state *state = state_of(type);
	PyObject *self = state ? PyType_GenericAlloc(type, 0) : NULL;

	(void)args, (void)kwargs;
	if (self)
		((any_object *)self)->state = state;
	return self;
}

bool init_first(bool called, const char *type)
{
	if (called)
		PyErr_Format(PyExc_RuntimeError, "%s.__init__() was called twice", type);
	return !called;
}

bool init_called(bool called, const char *type)
{
	if (!called)
		PyErr_Format(PyExc_RuntimeError, "%s.__init__() was not called", type);
	return called;
}

void object_free(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc free_ = PyType_GetSlot(type, Py_tp_free);

	free_(self);
	Py_DECREF((PyObject *)type);
}

/* ---- the module ----------------------------------------------------------------------------- */

/* clang-format off */
#define ADD(name) if (add_type(module, &name##_spec, &state->name) < 0) return -1;
#define VISIT(name) Py_VISIT(state->name);
#define CLEAR(name) Py_CLEAR(state->name);
/* clang-format on */

static int module_exec(PyObject *module)
{
	module_state *state = PyModule_GetState(module);

	if (errors_take(state) < 0 || add_tables(module) < 0 || add_numbers(module) < 0)
		return -1;
	TYPES(ADD)
	return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
	module_state *state = PyModule_GetState(module);

	TYPES(VISIT)
	Py_VISIT(state->error);
	Py_VISIT(state->reply);
	for (int i = 0; i < STATUSES; i++)
		Py_VISIT(state->exceptions[i]);
	return 0;
}

static int module_clear(PyObject *module)
{
	module_state *state = PyModule_GetState(module);

	TYPES(CLEAR)
	Py_CLEAR(state->error);
	Py_CLEAR(state->reply);
	for (int i = 0; i < STATUSES; i++)
		Py_CLEAR(state->exceptions[i]);
	return 0;
}

static void module_free(void *module)
{
	module_clear(module);
}

static PyModuleDef_Slot slots[] = {
	{Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
	{Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
	{Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* guard.h */
#endif
	{0, NULL},
};

static PyModuleDef definition = {
	.m_base = PyModuleDef_HEAD_INIT,
	.m_name = "shmq._native",
	.m_doc = "The C core of shmq; _native.pyi is its contract.",
	.m_size = sizeof(module_state),
	.m_methods = functions,
	.m_slots = slots,
	.m_traverse = module_traverse,
	.m_clear = module_clear,
	.m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void)
{
	return PyModuleDef_Init(&definition);
}

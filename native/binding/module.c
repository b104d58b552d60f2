#include "module.h"

#ifndef SHMQ_VERSION
#error "SHMQ_VERSION must be defined: the version in pyproject.toml"
#endif

/* ---- functions ------------------------------------------------------------------------------ */

static PyObject *native_now(PyObject *module, PyObject *unused)
{
	(void)module, (void)unused;
	return PyLong_FromLongLong(shmq_now());
}

static PyObject *native_realtime(PyObject *module, PyObject *unused)
{
	(void)module, (void)unused;
	return PyLong_FromLongLong(shmq_realtime());
}

static PyObject *native_fork_generation(PyObject *module, PyObject *unused)
{
	(void)module, (void)unused;
	return PyLong_FromUnsignedLong(shmq_fork_generation());
}

static PyObject *native_fingerprint(PyObject *module, PyObject *unused)
{
	(void)module, (void)unused;
	return PyLong_FromUnsignedLongLong(shmq_layout_fingerprint());
}

static PyObject *native_directory_bytes(PyObject *module, PyObject *unused)
{
	(void)module, (void)unused;
	return PyLong_FromUnsignedLongLong(shmq_directory_bytes());
}

static PyObject *native_name_valid(PyObject *module, PyObject *name)
{
	const char *text;
	Py_ssize_t length;

	(void)module;
	if (!PyUnicode_Check(name))
		return PyErr_Format(PyExc_TypeError, "name_valid() needs a str, not %R", name);
	text = PyUnicode_AsUTF8AndSize(name, &length);
	if (!text) { /* lone surrogates */
		PyErr_Clear();
		return PyBool_FromLong(0);
	}
	return PyBool_FromLong(shmq_name_valid(text, (size_t)length));
}

static PyObject *native_create_directory(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                         PyObject *kwnames)
{
	shmq_limits limits = {0};
	int status, fd;

	if (nargs != 1)
		return PyErr_Format(PyExc_TypeError, "create_directory() takes fd and eight keywords");
	fd = (int)PyLong_AsLong(args[0]);
	if (PyErr_Occurred() || limits_parse("create_directory", args + 1, 0, kwnames, &limits) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	status = shmq_directory_create(fd, &limits);
	Py_END_ALLOW_THREADS
	if (status != SHMQ_OK)
		return raise_status(PyModule_GetState(module), status, NULL, "create the directory");
	Py_RETURN_NONE;
}

static PyObject *native_queue_bytes(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames)
{
	shmq_limits limits = {0};

	(void)module;
	if (ARGUMENTS("queue_bytes", 3, {"arena_size", ARGUMENT_U64, &limits.arena_size},
	              {"mem_queue_size", ARGUMENT_U32, &limits.mem_queue_size},
	              {"inflight_slots", ARGUMENT_U32, &limits.inflight_slots}) < 0)
		return NULL;
	return PyLong_FromUnsignedLongLong(shmq_queue_bytes(&limits));
}

static PyObject *native_decode_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                       PyObject *kwnames)
{
	PyObject *records, *column[5] = {NULL}, *result = NULL;
	Py_buffer view;
	uint32_t count;
	int64_t bodies;
	char *to[5];
	int status;

	if (ARGUMENTS("decode_records", 2, {"records", ARGUMENT_OBJECT, &records},
	              {"count", ARGUMENT_U32, &count}) < 0 ||
	    PyObject_GetBuffer(records, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	bodies = (int64_t)view.len - 30 * (int64_t)count;
	if (bodies < 0) {
		PyErr_Format(PyExc_ValueError, "%zd bytes are not %u records", view.len, count);
		goto out;
	}
	{
		const size_t bytes_of[5] = {count * (size_t)8, count * (size_t)8, count * (size_t)4,
		                            (count + (size_t)1) * 4, (size_t)bodies};

		for (int i = 0; i < 5; i++) {
			column[i] = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes_of[i]);
			if (!column[i])
				goto out;
			to[i] = PyBytes_AsString(column[i]);
		}
	}
	Py_BEGIN_ALLOW_THREADS
	status = shmq_records_decode(view.buf, (uint64_t)view.len, count, (uint64_t *)(void *)to[0],
	                             (int64_t *)(void *)to[1], (int32_t *)(void *)to[2],
	                             (int32_t *)(void *)to[3], (uint8_t *)to[4]);
	Py_END_ALLOW_THREADS
	if (status != SHMQ_OK)
		raise_status(PyModule_GetState(module), status, NULL, "decode %u disk records", count);
	else
		result = PyTuple_Pack(5, column[0], column[1], column[2], column[3], column[4]);
out:
	PyBuffer_Release(&view);
	for (int i = 0; i < 5; i++)
		Py_XDECREF(column[i]);
	return result;
}

static PyObject *native_scan_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                     PyObject *kwnames)
{
	PyObject *data;
	uint64_t max_msg_size, used = 0;
	uint32_t records = 0, most = UINT32_MAX;
	bool damaged = false;
	Py_buffer view;
	int status;

	if (ARGUMENTS("scan_records", 2, {"data", ARGUMENT_OBJECT, &data},
	              {"max_msg_size", ARGUMENT_U64, &max_msg_size}, {"most", ARGUMENT_U32, &most}) < 0 ||
	    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	status = shmq_records_scan(view.buf, (uint64_t)view.len, max_msg_size, most, &records,
	                           &used, &damaged);
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&view);
	if (status != SHMQ_OK)
		return raise_status(PyModule_GetState(module), status, NULL, "scan disk records");
	return Py_BuildValue("(IKO)", records, (unsigned long long)used, damaged ? Py_True : Py_False);
}

static PyObject *native_scan_bodies(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames)
{
	PyObject *data;
	uint64_t start, end, max_msg_size, used = 0;
	uint32_t count, whole = 0;
	int64_t bad = 0;
	Py_buffer view;
	int status = SHMQ_OK;

	(void)module;
	if (ARGUMENTS("scan_bodies", 5, {"data", ARGUMENT_OBJECT, &data},
	              {"start", ARGUMENT_U64, &start}, {"end", ARGUMENT_U64, &end},
	              {"count", ARGUMENT_U32, &count}, {"max_msg_size", ARGUMENT_U64, &max_msg_size}) < 0 ||
	    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (start <= end && end <= (uint64_t)view.len)
		status = shmq_wire_bodies((const char *)view.buf + start, end - start, max_msg_size, count,
		                          NULL, &whole, &used, &bad);
	PyBuffer_Release(&view);
	if (start > end || end > (uint64_t)view.len)
		return PyErr_Format(PyExc_ValueError,
		                    "scan_bodies() needs 0 <= start <= end <= len(data)");
	if (status != SHMQ_OK)
		return Py_BuildValue("(KIL)", (unsigned long long)(start + used), whole, (long long)bad);
	return Py_BuildValue("(KIO)", (unsigned long long)(start + used), whole, Py_None);
}

static PyObject *native_has_pages(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                  PyObject *kwnames)
{
	PyObject *segment;
	uint64_t at, bytes;
	Py_buffer view;
	bool has;

	(void)module;
	if (ARGUMENTS("has_pages", 3, {"segment", ARGUMENT_OBJECT, &segment},
	              {"at", ARGUMENT_U64, &at}, {"nbytes", ARGUMENT_U64, &bytes}) < 0 ||
	    PyObject_GetBuffer(segment, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	has = at <= (uint64_t)view.len && bytes <= (uint64_t)view.len - at;
	if (has) {
		Py_BEGIN_ALLOW_THREADS
		has = shmq_segment_has_pages(view.buf, at, bytes);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&view);
	return PyBool_FromLong(has);
}

#ifdef SHMQ_KILLPOINTS
static PyObject *native_killpoint(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                  PyObject *kwnames)
{
	const char *name;
	uint32_t count = 1;

	(void)module;
	if (ARGUMENTS("killpoint", 1, {"name", ARGUMENT_TEXT_OR_NONE, &name},
	              {"count", ARGUMENT_U32, &count}) < 0)
		return NULL;
	shmq_killpoint_arm(name, count);
	Py_RETURN_NONE;
}
#endif

static PyMethodDef functions[] = {
	METHOD("now", native_now, METH_NOARGS, "now()\n--\n\nCLOCK_MONOTONIC, ns."),
	METHOD("realtime", native_realtime, METH_NOARGS, "realtime()\n--\n\nCLOCK_REALTIME, ns."),
	METHOD("fork_generation", native_fork_generation, METH_NOARGS,
	       "fork_generation()\n--\n\nRaised in every forked child."),
	METHOD("name_valid", native_name_valid, METH_O,
	       "name_valid(name, /)\n--\n\nIs it a name for a topic or channel?"),
	METHOD("fingerprint", native_fingerprint, METH_NOARGS,
	       "fingerprint()\n--\n\nHash of the layout as compiled."),
	METHOD("directory_bytes", native_directory_bytes, METH_NOARGS,
	       "directory_bytes()\n--\n\nSize of the directory segment."),
	METHOD("create_directory", native_create_directory, FAST,
	       "create_directory(fd, **limits)\n--\n\nFill a new directory segment."),
	METHOD("queue_bytes", native_queue_bytes, FAST,
	       "queue_bytes(*, arena_size, mem_queue_size, inflight_slots)\n--\n\n"
	       "Size of a queue segment."),
	METHOD("scan_bodies", native_scan_bodies, FAST,
	       "scan_bodies(data, start, end, count, max_msg_size)\n--\n\n"
	       "(end, whole, size that cannot be or None)."),
	METHOD("decode_records", native_decode_records, FAST,
	       "decode_records(records, count)\n--\n\n"
	       "(ids u64, timestamps i64, attempts i32, offsets i32, data) of whole records."),
	METHOD("scan_records", native_scan_records, FAST,
	       "scan_records(data, max_msg_size, most=4294967295)\n--\n\n"
	       "(whole records, up to so many, bytes they take, the next one is damaged)."),
	METHOD("has_pages", native_has_pages, FAST,
	       "has_pages(segment, at, nbytes)\n--\n\n"
	       "Can this part of a mapped segment be read? Makes the pages if there is room."),
#ifdef SHMQ_KILLPOINTS
	METHOD("killpoint", native_killpoint, FAST,
	       "killpoint(name, count=1)\n--\n\nSIGKILL at the count-th passing of `name`."),
#endif
	{NULL, NULL, 0, NULL},
};

/* ---- tables --------------------------------------------------------------------------------- */

/* dict[key] = value, which is stolen; -1 also when value is NULL. */
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

static int fill_layout(PyObject *layout, PyObject *sizes)
{
	size_t count;
	const shmq_field *field = shmq_layout(&count);

	for (; count; count--, field++) {
		PyObject *fields = inner(layout, field->structure);

		if (!fields ||
		    put(fields, field->name,
		        Py_BuildValue("(sIII)", field->dtype, field->offset, field->size, field->count)) ||
		    put(sizes, field->structure,
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

static int add_tables(PyObject *module)
{
	PyObject *layout = PyDict_New(), *sizes = PyDict_New(), *constants = PyDict_New(),
			 *statuses = PyDict_New();
	int r = -1;

	if (layout && sizes && constants && statuses && fill_layout(layout, sizes) == 0 &&
	    fill_constants(constants) == 0 && fill_status(statuses) == 0 &&
	    PyModule_AddObjectRef(module, "LAYOUT", layout) == 0 &&
	    PyModule_AddObjectRef(module, "SIZES", sizes) == 0 &&
	    PyModule_AddObjectRef(module, "CONSTANTS", constants) == 0 &&
	    PyModule_AddObjectRef(module, "STATUS", statuses) == 0)
		r = 0;
	Py_XDECREF(layout);
	Py_XDECREF(sizes);
	Py_XDECREF(constants);
	Py_XDECREF(statuses);
	return r;
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

static int add_type(PyObject *module, PyType_Spec *spec, bool public, PyTypeObject **type)
{
	*type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
	if (!*type)
		return -1;
	return public ? PyModule_AddType(module, *type) : 0;
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

void object_free(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc free_ = PyType_GetSlot(type, Py_tp_free);

	free_(self);
	Py_DECREF((PyObject *)type);
}

PyObject *closed_get(PyObject *self, void *offset)
{
	return PyBool_FromLong(*(const bool *)((const char *)self + (size_t)offset));
}

PyObject *object_get(PyObject *self, void *offset)
{
	PyObject *value = *(PyObject *const *)((const char *)self + (size_t)offset);

	return Py_NewRef(value ? value : Py_None);
}

/* ---- the module ----------------------------------------------------------------------------- */

static int module_exec(PyObject *module)
{
	module_state *state = PyModule_GetState(module);

	if (errors_add(module, state) < 0 || add_tables(module) < 0 || add_numbers(module) < 0 ||
	    add_type(module, &broker_spec, true, &state->broker) < 0 ||
	    add_type(module, &segment_spec, false, &state->segment) < 0 ||
	    add_type(module, &spill_spec, true, &state->spill) < 0 ||
	    add_type(module, &producer_spec, true, &state->producer) < 0 ||
	    add_type(module, &loan_spec, true, &state->loan) < 0 ||
	    add_type(module, &consumer_spec, true, &state->consumer) < 0 ||
	    add_type(module, &message_spec, true, &state->message) < 0 ||
	    add_type(module, &batch_spec, true, &state->batch) < 0 ||
	    add_type(module, &waiter_spec, true, &state->waiter) < 0 ||
	    add_type(module, &window_spec, true, &state->window) < 0)
		return -1;
	return 0;
}

#define EACH_TYPE(DO, state)                                                                       \
	DO((state)->broker);                                                                           \
	DO((state)->segment);                                                                          \
	DO((state)->spill);                                                                            \
	DO((state)->producer);                                                                         \
	DO((state)->loan);                                                                             \
	DO((state)->consumer);                                                                         \
	DO((state)->message);                                                                          \
	DO((state)->batch);                                                                            \
	DO((state)->waiter);                                                                           \
	DO((state)->window)

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
	module_state *state = PyModule_GetState(module);

	EACH_TYPE(Py_VISIT, state);
	Py_VISIT(state->error);
	for (int i = 0; i < STATUSES; i++)
		Py_VISIT(state->exceptions[i]);
	return 0;
}

static int module_clear(PyObject *module)
{
	module_state *state = PyModule_GetState(module);

	EACH_TYPE(Py_CLEAR, state);
	Py_CLEAR(state->error);
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
	{Py_mod_gil, Py_MOD_GIL_USED}, /* an object's own fields are guarded by it */
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

"use strict";
// What the page does: looks prices up, draws them, and keeps one chosen model in every place. It computes no price.

(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const controls = { protocol: byId("protocol"), network: byId("network"), seq_len: byId("seq_len") };
  const FITTED_IN = "its own";
  const state = { setting: 0, measure: 0, point: data.pick };
  const views = {};

  // ---- numbers as people read them

  const UNITS = [
    [[3600, "h"], [60, "min"], [1, "s"]],
    [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
    [[1, "rounds"]],
  ];

  function unitFor(measure, largest) {
    return UNITS[measure].find(([size]) => largest >= size) || UNITS[measure].at(-1);
  }

  function said(measure, value) {
    if (value === null) return "not known";
    if (measure === 2) return Math.round(value).toLocaleString("en");
    const [size, unit] = unitFor(measure, value);
    return `${size === 1 ? Number(value.toPrecision(3)) : (value / size).toFixed(2)} ${unit}`;
  }

  // ---- controls

  const networkOf = (setting) => setting.network ?? FITTED_IN;

  function fill(select, values, chosen) {
    select.replaceChildren(...values.map((value) => new Option(value, value, false, String(value) === String(chosen))));
  }

  function unique(values) {
    return [...new Set(values)];
  }

  function fillControls() {
    const now = data.settings[state.setting];
    const same = data.settings.filter((one) => one.protocol === now.protocol);
    fill(controls.protocol, unique(data.settings.map((one) => one.protocol)), now.protocol);
    fill(controls.network, unique(same.map(networkOf)), networkOf(now));
    const lengths = same.filter((one) => networkOf(one) === networkOf(now)).map((one) => one.seq_len);
    fill(controls.seq_len, unique(lengths).sort((a, b) => a - b), now.seq_len);
    const counted = now.fronts[2] !== null && now.totals[0][2] !== null;
    byId("measure").options[2].disabled = !counted;
    if (!counted && state.measure === 2) state.measure = 0;
    byId("measure").value = String(state.measure);
  }

  // The setting that agrees with the controls in most, those named first before the others.
  function find(order) {
    const agrees = (one, name) => String(name === "network" ? networkOf(one) : one[name]) === controls[name].value;
    const score = (one) => order.reduce((sum, name) => 2 * sum + agrees(one, name), 0);
    return data.settings.reduce((best, one, index) => (score(one) > score(data.settings[best]) ? index : best), 0);
  }

  function tell() {
    const now = data.settings[state.setting];
    const words = [
      state.setting === 0 ? "As searched" : "Priced anew; no budget holds here",
      `${now.protocol}${now.network ? ` on ${now.network}` : ""}, prompt of ${now.seq_len} tokens`, now.trust,
    ];
    if (now.seq_len !== data.seq_len) words.push(`perplexities are of ${data.seq_len} tokens all the same`);
    if (now.outside) words.push(now.outside);
    byId("told").textContent = words.join("; ") + ".";
  }

  // ---- charts

  async function draw(id, spec) {
    const done = await vegaEmbed(byId(id), spec, { actions: false, renderer: "svg", ast: true, mode: "vega-lite" });
    views[id]?.finalize();
    views[id] = done.view;
    done.view.addEventListener("click", (_, item) => {
      if (item?.datum?.point !== undefined) choose(item.datum.point);
    });
  }

  const columnOf = (setting, point) => data.columns[setting.parts[point][state.measure]];

  function placeOf(index) {
    const role = data.points[index].role;
    if (role === "paper" || role === "parent") return role;
    if (data.settings[state.setting].fronts[state.measure].includes(index)) return "front";
    return role === "front" ? "dominated" : role;
  }

  function drawFront() {
    const now = data.settings[state.setting];
    const [size, unit] = unitFor(state.measure, Math.max(...now.totals.map((one) => one[state.measure])));
    const scaled = (value) => (value === null || value === undefined ? null : value / size);
    const asSearched = state.setting === 0 && state.measure === 0;
    const rows = data.points.map((one, point) => ({
      point, number: one.number || "", role: placeOf(point), architecture: one.name, runs_as: one.runs_as ?? "as written",
      perplexity: one.perplexity, said: one.said, low: one.low, high: one.high, price: scaled(now.totals[point][state.measure]),
      least: asSearched && one.range ? scaled(one.range[0]) : null, most: asSearched && one.range ? scaled(one.range[1]) : null,
      time: said(0, now.totals[point][0]), sent: said(1, now.totals[point][1]), rounds: said(2, now.totals[point][2]),
    }));
    const heights = [...rows.flatMap((row) => [row.perplexity, row.low, row.high]), ...data.ngrams.map((one) => one.perplexity)];
    const known = heights.filter((value) => value !== null);
    const name = ["predicted time a token", "bytes sent a token", "rounds a token"][state.measure];
    return draw("front-chart", frontSpec({
      rows, chosen: state.point, axis: state.measure === 2 ? name : `${name} (${unit})`,
      front: now.fronts[state.measure].map((index) => rows[index]),
      ngrams: data.ngrams.map((one) => ({ name: `${one.name} ${one.perplexity.toPrecision(3)}`, perplexity: one.perplexity })),
      budget: scaled(now.budgets[state.measure]), domain: [Math.min(...known) * 0.94, Math.max(...known) * 1.12],
      height: narrow() ? 320 : 400,
    }));
  }

  function labelOf(index) {
    const one = data.points[index];
    const name = one.name.length > 26 ? `${one.name.slice(0, 25)}…` : one.name;
    return one.number ? `${one.number}  ${name}` : name;
  }

  function drawBars() {
    const now = data.settings[state.setting];
    const shown = data.points.map((_, index) => index).filter((index) => ["front", "baseline", "parent"].includes(data.points[index].role));
    const [size, unit] = unitFor(state.measure, Math.max(...shown.map((index) => now.totals[index][state.measure])));
    const rows = shown.flatMap((point, order) => now.kinds.map((kind, place) => {
      const value = columnOf(now, point)[place];
      return { point, label: labelOf(point), order, kind, value: value / size, said: said(state.measure, value), share: value / now.totals[point][state.measure] };
    })).filter((row) => row.value > 0);
    const sums = new Map(now.kinds.map((kind) => [kind, 0]));
    for (const row of rows) sums.set(row.kind, sums.get(row.kind) + row.value);
    const kinds = now.kinds.filter((kind) => sums.get(kind) > 0).sort((one, other) => sums.get(other) - sums.get(one));
    for (const row of rows) row.kind_order = kinds.indexOf(row.kind);
    return draw("bars", barsSpec({ rows, kinds, chosen: state.point, axis: state.measure === 2 ? "rounds a token" : `${unit} a token` }));
  }

  function drawTraining() {
    const columns = Math.max(1, Math.floor((byId("entropies").clientWidth - 10) / 172));
    const titles = new Map(data.points.filter((one) => one.number).map((one) => [one.number, `no. ${one.number}`]));
    const cells = data.entropies.map((one) => ({ ...one, title: titles.get(one.number) }));
    const specs = [
      ["curves", data.curves, curvesSpec({ rows: data.curves, chosen: data.points[state.point].number })],
      ["entropies", cells, entropySpec({ rows: cells, most: Math.log(data.seq_len), columns })],
      ["hypervolumes", data.hypervolumes, hypervolumeSpec({ rows: data.hypervolumes })],
    ];
    return specs.map(([id, rows, spec]) => () => {
      if (rows.length) return draw(id, spec);
      byId(id).textContent = "This run has no record of it.";
    });
  }

  // ---- the chosen model

  function fillBreakdown() {
    const now = data.settings[state.setting];
    const parts = columnOf(now, state.point);
    const total = now.totals[state.point][state.measure];
    const kinds = now.kinds.map((kind, index) => [kind, parts[index]]).filter(([, value]) => value > 0);
    kinds.sort((one, other) => other[1] - one[1]);
    byId("breakdown").caption.textContent = `${said(state.measure, total)}${state.measure === 2 ? " rounds" : ""}, by kind of op`;
    byId("breakdown").tBodies[0].replaceChildren(...kinds.map(([kind, value]) => {
      const row = document.createElement("tr");
      const name = document.createElement("th");
      const bar = document.createElement("span");
      name.scope = "row";
      name.textContent = kind;
      bar.style.width = `${(100 * value) / kinds[0][1]}%`;
      const cells = [name, ...[1, 2, 3].map(() => document.createElement("td"))];
      cells[1].className = "bar";
      cells[1].append(bar);
      cells[2].className = cells[3].className = "number";
      cells[2].textContent = said(state.measure, value);
      cells[3].textContent = `${((100 * value) / total).toFixed(1)} %`;
      row.append(...cells);
      return row;
    }));
  }

  function choose(point) {
    state.point = point;
    document.querySelectorAll(".panel").forEach((panel, index) => { panel.hidden = index !== point; });
    document.querySelectorAll("button.choose").forEach((button) => {
      const pressed = Number(button.dataset.point) === point;
      button.setAttribute("aria-pressed", String(pressed));
      button.closest(".member").classList.toggle("chosen", pressed);
    });
    byId("model").value = String(point);
    fillBreakdown();
    for (const id of ["front-chart", "bars"]) views[id]?.signal("chosen", point).runAsync();
    views.curves?.signal("chosen", data.points[point].number).runAsync();
  }

  async function redraw() {
    fillControls();
    tell();
    fillBreakdown();
    await drawFront();
    await drawBars();
  }

  controls.protocol.addEventListener("change", () => { state.setting = find(["protocol", "seq_len", "network"]); redraw(); });
  controls.network.addEventListener("change", () => { state.setting = find(["protocol", "network", "seq_len"]); redraw(); });
  controls.seq_len.addEventListener("change", () => { state.setting = find(["protocol", "network", "seq_len"]); redraw(); });
  byId("measure").addEventListener("change", (event) => { state.measure = Number(event.target.value); redraw(); });
  byId("model").addEventListener("change", (event) => choose(Number(event.target.value)));
  document.querySelectorAll("button.choose").forEach((button) => {
    button.addEventListener("click", () => choose(Number(button.dataset.point)));
  });
  byId("front-chart").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose((state.point + step + data.points.length) % data.points.length);
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details:not(.licenses)").forEach((one) => { one.open = true; }));

  async function start() {
    choose(state.point);
    fillControls();
    tell();
    await drawFront();
    for (const step of [drawBars, ...drawTraining()]) {
      await new Promise((resolve) => setTimeout(resolve)); // the page answers between charts
      await step();
    }
    document.body.dataset.drawn = "all";
  }

  start();
})();

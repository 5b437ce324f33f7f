// Draws the charts that are in view of their section's choices, in the colours of the reader's theme.
const { charts, themes } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 700px)");
const views = new Map();

function chosen(place) {
  const boxes = place.closest("section").querySelectorAll(".names input:checked");
  return Array.from(boxes, (box) => box.value);
}

// On a narrow screen names beside the lines would take half of it; the list above the charts has the colours. A map of
// cases takes the room there is, within what its texts need and what the eye can follow.
function fitted(spec, room) {
  const copy = structuredClone(spec);
  const { columns, side_px: side } = spec.usermeta;
  if (narrow.matches) copy.layer = copy.layer.filter((layer) => layer.name !== "labels");
  if (columns) copy.width = Math.min(columns * 250, Math.max(columns * 110, room - side));
  return copy;
}

async function draw(place) {
  const theme = structuredClone(dark.matches ? themes.dark : themes.light);
  if (narrow.matches) theme.axis.labelLimit = 120;
  const embedded = await vegaEmbed(place, fitted(charts[place.dataset.chart], place.clientWidth), {
    mode: "vega-lite",
    config: theme,
    renderer: "svg",
    tooltip: { theme: dark.matches ? "dark" : "light" },
    actions: { export: true, source: false, compiled: false, editor: false },
  });
  views.get(place)?.finalize();
  views.set(place, embedded.view);
  await choose(place);
}

async function choose(place) {
  const view = views.get(place);
  if (!view || !("shown" in view.getState().signals)) return;
  const names = chosen(place);
  const { rows, row_px: height } = charts[place.dataset.chart].usermeta;
  if (rows) view.height(height * Math.max(1, rows.filter((name) => names.includes(name)).length));
  await view.signal("shown", names).runAsync();
}

async function drawAll() {
  for (const place of document.querySelectorAll(".chart")) await draw(place);
  document.documentElement.dataset.drawn = document.querySelectorAll(".chart svg.marks").length;
}

for (const box of document.querySelectorAll(".names input")) {
  box.addEventListener("change", () => box.closest("section").querySelectorAll(".chart").forEach(choose));
}
for (const select of document.querySelectorAll("figure select")) {
  select.addEventListener("change", () => {
    const place = select.parentElement.querySelector(".chart");
    place.dataset.chart = select.value;
    draw(place);
  });
}
dark.addEventListener("change", drawAll);
narrow.addEventListener("change", drawAll);
drawAll();

selector => {
  const parse = text => text.match(/[\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = colour => colour.slice(0, 3).map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll(selector)].filter(one => one.checkVisibility()).map(one => {
    const pair = [light(parse(getComputedStyle(one).color)), light(behind(one))].sort((a, b) => a - b);
    return [(pair[1] + 0.05) / (pair[0] + 0.05), one.className + " " + one.textContent.trim().slice(0, 30)];
  });
}
